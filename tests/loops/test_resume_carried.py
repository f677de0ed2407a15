"""Real runs that carry completions over, killed in every phase and resumed."""

from __future__ import annotations

import shutil

import pytest

from tests.learning.one_rank import same
from tests.loops import test_resume
from tests.loops.jobs import Job
from tests.loops.test_resume import AHEAD, kill_in, killed_is_undisturbed, placed, weights_of
from trainer import config as c
from trainer.checkpoint import rollout_log

pytestmark = test_resume.pytestmark
base = test_resume.base
ahead = test_resume.ahead
undisturbed_ahead = test_resume.undisturbed_ahead

CUT = 4
"""Tokens by which completions of at most 12 grow in a phase, in the runs that carry them over."""


@pytest.fixture(scope="module")
def carried(ahead):
    """The run that samples two steps ahead, a third of a completion at a time."""
    return c.override(ahead, [f"rollout.tokens_per_step={CUT}"])


@pytest.fixture(scope="module")
def undisturbed_carried(carried, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed-carried")
    job = Job(placed(carried, folder), folder).start()
    assert job.wait(900) == 0, job.tail()
    lines = job.metrics()
    assert [line["rollout/staleness_max"] for line in lines[1:]] == [0, 1, *[2] * (AHEAD - 2)]
    assert all(line["rollout/carried_fraction"] > 0.5 for line in lines[2:])
    assert all(line["mismatch/kl"] < 1e-6 < line["staleness/kl"] for line in lines[3 : AHEAD - 1])
    # In the newest segment the ratio is that of kernels alone.
    assert all(abs(line["staleness/age_0_ratio_max"] - 1) < 1e-3 for line in lines[1:])
    assert all(abs(line["staleness/age_2_ratio_max"] - 1) > 1e-3 for line in lines[3:])
    return job


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        [("rollout", 2), ("update", 4), ("sync", 6)],
        [("sync", 0), ("grade", 3), ("rollout", 5), ("eval", 6)],
        [("save", 2), ("save", 4), ("save", 5)],
    ],
)
def test_carried_over_and_killed_anywhere_it_is_the_same_run(carried, undisturbed_carried, tmp_path, plan):
    """Cut completions are in the log of the phase that cut them, and go on from there."""
    killed_is_undisturbed(carried, undisturbed_carried, tmp_path, plan)


@pytest.mark.long
def test_carried_over_on_nodes_that_are_lost_it_is_the_same_run(carried, undisturbed_carried, tmp_path):
    """Every node is a fresh one: the store had the log before it had the checkpoint."""
    job = Job(placed(carried, tmp_path, remote=f"file://{tmp_path}/store", every_steps=2), tmp_path)
    store = tmp_path / "store/small"
    for phase, step in (("update", 4), ("rollout", 5)):
        kill_in(job, phase, step)
        newest = max((int(p.parents[1].name[5:]) for p in store.rglob("manifest.json")), default=0)
        logged = {int(p.parent.name[5:]) for p in store.glob("rollouts/step-*/*.npz")}
        assert not newest or newest in logged
        shutil.rmtree(job.run_dir)
    assert job.start().wait(900) == 0, job.tail()
    assert job.metrics() == undisturbed_carried.metrics()
    assert weights_of(job) == weights_of(undisturbed_carried)


@pytest.mark.long
def test_a_limit_as_long_as_a_completion_changes_no_bit(ahead, undisturbed_ahead, tmp_path):
    """All figures of the run that only samples ahead, and its weights."""
    job = Job(placed(c.override(ahead, ["rollout.tokens_per_step=12"]), tmp_path), tmp_path).start()
    assert job.wait(900) == 0, job.tail()
    for mine, theirs in zip(job.metrics(), undisturbed_ahead.metrics(), strict=True):
        assert theirs.items() <= mine.items()
    assert weights_of(job) == weights_of(undisturbed_ahead)


@pytest.mark.long
def test_one_rank_carries_over_what_two_do(carried, tmp_path):
    """At a learning rate that changes no weight: what two ranks sum, they round otherwise."""
    found = []
    for ranks in (1, 2):
        options = ["optimizer.learning_rate=1e-30", f"placement.workers_per_node={ranks}", "run.max_steps=4"]
        job = Job(placed(c.override(carried, options), tmp_path / str(ranks)), tmp_path / str(ranks)).start()
        assert job.wait(900) == 0, job.tail()
        found.append(dict(rollout_log.logged_steps(job.run_dir / "rollouts", None)))
    one, two = found
    assert list(one) == list(two) == [1, 2, 3, 4]
    for step in one:
        for name in ("traces", "waiting"):
            pairs = list(zip(getattr(one[step], name), getattr(two[step], name), strict=True))
            assert all(same(a, b) for a, b in pairs)
        assert {trace.end for trace in one[step].waiting} <= {"stop", "cut"}
    assert [len(trace.segments) for trace in one[3].traces].count(3) > 8
    assert any(trace.images for trace in one[3].traces if len(trace.segments) == 3)
