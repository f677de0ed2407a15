"""The fault drill, small: the session, checkpoints and store are real, the ranks pretend to train; and a real
one."""

import pytest

from tests.loops.drill import play


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_small_drill_ends_as_the_undisturbed_run(tmp_path):
    figures = play(tmp_path, kills=5, steps=24, ranks=2, seed=3, standin=True)
    assert 0 < sum(figures["faults"].values()) <= 5
    for strike in figures["strikes"]:
        # no store, no damage: the interval, the save and the step under way
        if strike["fault"] == "kill, same node":
            assert strike["lost_steps"] in (None, 0, 1, 2, 3, 4), strike


@pytest.mark.lab
@pytest.mark.timeout(1800)
def test_a_small_drill_with_the_real_trainer(tmp_path):
    figures = play(tmp_path, kills=3, steps=10, ranks=1, seed=1)
    assert sum(figures["faults"].values()) == 3


@pytest.mark.lab
@pytest.mark.timeout(1800)
def test_a_small_drill_that_samples_ahead(tmp_path):
    figures = play(tmp_path, kills=3, steps=12, ranks=1, seed=5, staleness=2)
    assert sum(figures["faults"].values()) == 3
