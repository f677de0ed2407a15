"""The package of the task families, for tests that need it."""

from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.rewards import families


def needed() -> Path:
    """Its folder. The test is skipped where it cannot be fetched."""
    try:
        return families.packages()
    except ConfigError as error:
        pytest.skip(f"needs the package reasoning-gym: {error}")
