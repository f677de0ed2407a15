"""The parts of a start add up to it, from the launcher's first line on."""

import time

import pytest

from tests.metric_table import unknown_names
from trainer.observe.start_clock import STARTED_VARIABLE, StartClock


def test_the_parts_add_up_to_the_start():
    clock = StartClock({STARTED_VARIABLE: str(time.time() - 40)})
    for part in ("launch", "place", "load", "resume", "sync"):
        clock.mark(part)
    metrics = clock.metrics()
    assert unknown_names(list(metrics)) == [] and len(metrics) == 6
    assert metrics["perf/start_launch_s"] == pytest.approx(40, abs=2)
    assert metrics.pop("perf/start_s") == pytest.approx(sum(metrics.values()), abs=1e-6)
    assert not clock.told and clock.tell().startswith("ready 40.") and clock.told
    assert StartClock({}).metrics() == {"perf/start_s": 0.0}
