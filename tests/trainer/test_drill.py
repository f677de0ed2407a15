"""The fault drill, small: three faults over a short run of one rank."""

import pytest

from tests.drill import play


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_small_drill_ends_as_the_undisturbed_run(tmp_path):
    figures = play(tmp_path, kills=3, steps=10, ranks=1, seed=1)
    assert sum(figures["faults"].values()) == 3
    assert figures["steps_lost_per_preemption_max"] in (None, 0, 1, 2, 3, 4)
