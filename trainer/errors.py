"""The error that any package may raise for what a user can change."""


class ConfigError(ValueError):
    """A configuration, data set or machine that cannot run. The message is one line and says what to change."""
