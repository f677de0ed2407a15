"""A run's checkpoints with two synthetic ranks, and what they say."""

import pytest

from tests.checkpoint.synthetic import attempt, configure, writers


@pytest.fixture
def told():
    return []


@pytest.fixture
def run(tmp_path, told):
    """(config, checkpoints, writers of 2 ranks) of a run with a local and a file:// remote store."""
    config = configure(tmp_path, "placement.workers_per_node=2")
    checkpoints = attempt(config, told)
    yield config, checkpoints, writers(config, 2)
    checkpoints.close()
