"""Errors that more than one package raises or reads."""


class ConfigError(ValueError):
    """A configuration, data set or machine that cannot run. The message is one line and says what to change."""


class RayError(RuntimeError):
    """Ray did not start, or placed nothing on a cluster that is large enough: worth another start."""
