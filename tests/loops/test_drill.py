"""The fault drill, small: the session, checkpoints and store are real, the ranks pretend to train; and a real
one."""

import pytest

from tests.loops.drill import play


@pytest.mark.parametrize(
    ("kills", "steps", "ranks", "seed", "how"),
    [
        pytest.param(5, 24, 2, 3, {"standin": True}, id="stand-in", marks=pytest.mark.long),
        pytest.param(3, 10, 1, 1, {}, id="the real trainer", marks=pytest.mark.lab),
        pytest.param(3, 12, 1, 5, {"staleness": 2}, id="samples ahead", marks=pytest.mark.lab),
    ],
)
@pytest.mark.timeout(1800)
def test_a_small_drill_ends_as_the_undisturbed_run(tmp_path, kills, steps, ranks, seed, how):
    figures = play(tmp_path, kills, steps, ranks, seed, **how)
    assert 0 < sum(figures["faults"].values()) <= kills
