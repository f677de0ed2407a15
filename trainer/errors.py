"""Errors that more than one package raises or reads."""


class ConfigError(ValueError):
    """A configuration, data set or machine that cannot run. The message is one line and says what to
    change."""


class RayError(RuntimeError):
    """Ray did not start, or placed nothing on a cluster that is large enough: worth another start."""


class StorageError(RuntimeError):
    """A store or the hub failed for longer than the retries last: another start may find it well."""
