"""The package of the task families, for tests that need it."""

from pathlib import Path

import pytest

from trainer.rewards import task_families
from trainer.system.errors import ConfigError


def needed() -> Path:
    """Its folder. The test is skipped where it cannot be fetched."""
    try:
        return task_families.family_packages()
    except ConfigError as error:
        pytest.skip(f"needs the package reasoning-gym: {error}")
