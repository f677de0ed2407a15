"""Completions that are carried over, over the real loop, log and prompts: the ranks are a number, as in
`test_replay`."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.loops import test_replay
from tests.loops.test_replay import STEPS, Killed, Run, train
from trainer import config as c
from trainer.checkpoint.manifest import CorruptCheckpoint
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.run.session import Session

config = test_replay.config
"""The fixture."""


def carrying(config, tokens, staleness, *options):
    config = c.override(
        config, [f"rollout.tokens_per_step={tokens}", f"rollout.staleness={staleness}", *options]
    )
    c.validate(config)
    return config


def logged(config):
    """What is logged, by step."""
    log = RolloutLog(config, "rows")
    found = {step: log.read(step) for step in log.open(0)}
    log.close()
    return found


@pytest.mark.parametrize(("tokens", "staleness"), [(1, 1), (5, 1), (5, 3), (2, 8), (19, 2)])
def test_a_completion_grows_by_the_limit_under_each_version_and_its_last_one_ends_it(
    config, tokens, staleness
):
    config = carrying(config, tokens, staleness)
    run = train(Run(config))
    found = logged(config)
    assert list(found) == list(range(1, STEPS + 1))
    several = 0
    for step, graded in found.items():
        assert graded is not None and len(graded.traces) == config.samples_per_step
        first = max(0, step - 1 - staleness)
        for trace in graded.traces:
            assert trace.end == "stop", "nothing that is trained is cut"
            count = len(trace.completion)
            rounds = min(-(-count // tokens), step - first)
            expected = [(trace.shared + i * tokens, first + i) for i in range(rounds)]
            assert trace.segments == tuple(expected)
            assert len(trace.token_versions) == count
            several += rounds > 1
        later = min(staleness, STEPS - step)
        groups = {trace.group // 4 for trace in graded.waiting}
        assert groups == set(range(1, later + 1))
    assert several or tokens == 19
    assert run.model.tokens == sum(len(t.completion) for g in found.values() if g for t in g.traces)
    shares = [line["rollout/carried_fraction"] for line in run.lines.values()]
    assert (max(shares) > 0) == (tokens < 19)
    assert all(0 < line["perf/slots_used"] <= 1 for line in run.lines.values() if "perf/slots_used" in line)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_limit_that_no_completion_reaches_is_no_limit(config, tmp_path, staleness):
    """Rows, completions, updates and metrics are those of the run that only samples ahead."""
    plain = c.override(config, [f"rollout.staleness={staleness}", f"run.dir={tmp_path}/plain"])
    whole = train(Run(plain))
    cut = train(Run(carrying(config, 19, staleness)))
    assert cut.model.value == whole.model.value != 0
    for step, line in whole.lines.items():
        assert 0 < line.pop("perf/slots_used") < 1  # of the step's completions, sampled in an earlier phase
        assert line.items() <= cut.lines[step].items()
    assert [call for call in cut.model.calls if call[0] == "sync"] == [
        call for call in whole.model.calls if call[0] == "sync"
    ]


def die(kind: str, step: int):
    """Dies at a moment of a step's phase."""

    class Dying(Run):
        def score(self, samples):
            if (kind, self.model.step) == ("grade", step):
                raise Killed
            return super().score(samples)

        def log_graded(self, at, *values):
            if (kind, at) == ("before the log", step):
                raise Killed
            graded = Session.log_graded(self, at, *values)  # ty: ignore[invalid-argument-type]
            if (kind, at) == ("after the log", step):
                raise Killed
            return graded

        def save(self, at, *values):
            if (kind, at) == ("before the commit", step):
                raise Killed
            super().save(at, *values)
            if (kind, at) == ("after the commit", step):
                raise Killed

    return Dying


MOMENTS = ["grade", "before the log", "after the log", "update", "before the commit", "after the commit"]


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_killed_at_any_moment_it_is_the_same_run_and_no_logged_token_is_sampled_twice(
    config, tmp_path, kind, step
):
    config = carrying(config, 5, 2)
    calm = train(Run(c.override(config, [f"run.dir={tmp_path}/calm"])))
    nothing = (0, 0, None, ())
    killed = die(kind, step)(config, dies_in=step if kind == "update" else 0)
    with pytest.raises(Killed):
        train(killed)
    lost = 0
    if kind in ("grade", "before the log"):  # the phase that was not logged is sampled again
        whole = [trace for graded in logged(config).values() if graded for trace in graded.traces]
        last = logged(config).get(step - 1)
        lost = killed.model.tokens - sum(len(t.completion) for t in [*whole, *(last.waiting if last else ())])
    again = train(Run(config, [nothing, *killed.saves.values()][-2:][0]))
    assert again.model.value == calm.model.value != 0
    assert {**killed.lines, **again.lines} == calm.lines
    assert killed.model.tokens + again.model.tokens == calm.model.tokens + lost


def test_a_teacher_that_has_judged_a_step_is_not_asked_again_and_what_waits_is_kept(config, tmp_path):
    config = carrying(config, 5, 2, "algorithm.teacher=some/teacher")
    calm = train(Run(c.override(config, [f"run.dir={tmp_path}/calm"])))
    killed = Run(config, dies_in=6)
    with pytest.raises(Killed):
        train(killed)
    again = train(Run(config, killed.saves[4]))
    assert again.model.value == calm.model.value
    assert [step for name, step in again.model.calls if name == "judge"] == [7, 8]


def test_a_checkpoint_without_the_log_that_it_goes_on_from_is_not_resumed(config):
    config = carrying(config, 5, 2)
    killed = Run(config, dies_in=5)
    with pytest.raises(Killed):
        train(killed)
    assert list(killed.saves[4][3]) == [4]
    (killed.rollouts.place.folder / "step-00000004.npz").unlink()
    with pytest.raises(CorruptCheckpoint, match="the completions of step 4"):
        Run(config, killed.saves[4]).resume()


def test_the_log_that_the_oldest_checkpoint_goes_on_from_is_kept(config):
    class KeepsTwo(Run):
        def save(self, step, *values):
            super().save(step, *values)
            self.checkpoints.retention.floor = step - 2

    run = train(KeepsTwo(carrying(config, 5, 1)))
    kept = sorted(int(path.stem[5:]) for path in run.rollouts.place.folder.iterdir())
    assert kept == [5, 6, 7, 8], "the last write knew of checkpoints 5 to 7"


def test_a_finished_run_that_is_made_longer_begins_anew(config):
    config = carrying(config, 5, 2)
    done = train(Run(config))
    assert list(done.saves[STEPS][3]) == []
    longer = train(Run(c.override(config, [f"run.max_steps={STEPS + 3}"]), done.saves[STEPS]))
    assert sorted(longer.lines) == [STEPS + 1, STEPS + 2, STEPS + 3]
    assert longer.lines[STEPS + 1]["rollout/staleness_max"] == 0


def test_phases_that_sample_nothing_load_no_weights(config):
    """Where every completion ended in its first phase, the last K phases have nothing to sample."""
    run = train(Run(carrying(config, 19, 3)))
    asked = [step for name, step in run.model.calls if name == "generate"]
    assert asked == list(range(1, STEPS - 2))


def test_the_picture_is_what_its_script_draws_and_shows_what_the_schedule_does(monkeypatch):
    """Both pieces of a completion have its tokens, and no phase is longer than the limit allows."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_carried as picture  # ty: ignore[unresolved-import]

    assert picture.PICTURE.read_text() == picture.drawn(), "run python docs/draw_carried.py"
    for step in range(len(picture.LENGTHS)):
        pieces = picture.begun(step) + picture.ended(step)
        assert sum(tokens for _, tokens in pieces) == sum(picture.LENGTHS[step])
        assert max(tokens for _, tokens in pieces) == picture.LIMIT
