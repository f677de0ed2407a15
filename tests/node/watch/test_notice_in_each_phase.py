"""A notice with five seconds left, in each phase of a run: what is left to resume from.

Saving, checkpoints, the notice and the phases are real, and so is their order (trainer/loops/grpo.py); the
weights are those of tests/checkpoint/synthetic.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import again, attempt, configure, cut, holds, whole, writers
from trainer.node.watch import preemption
from trainer.node.watch.preemption import PreemptionNotice
from trainer.observe.phases import Phases
from trainer.run.saving import Preempted, RunPosition, Saving

NOTICE_S = 5
EVERY = 2
"""Steps between two saves."""
BEFORE = ("resume", "sync", "eval")
"""Phases before the first step: the checkpoint is loaded, the engine gets its first weights and is scored."""
OF_A_STEP = ("rollout", "grade", "update", "sync", "eval", "checkpoint")


class SmallLearner:
    """Has the weights of the step that it has learned last."""

    def __init__(self, config) -> None:
        self.step = 0
        (self.writer,) = writers(config, 1)

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        self.writer.start(step, cut(whole(self.step), 0, 1), {}, keep, send, attempt)
        return 0.0

    def send(self, step: int) -> None:
        self.writer.send(step)

    def save_status(self):
        return [self.writer.status()]


class SmallRun:
    """A run that goes on from its newest checkpoint, and gets a notice in a phase of a step."""

    def __init__(self, config, env, told, at: tuple[int, str] = (0, ""), step_s: float = 0.01) -> None:
        self.at, self.step_s = at, step_s
        self.flag = preemption.flag_file(env)
        self.notice = PreemptionNotice(signals=False, env=env)
        self.learner = SmallLearner(config)
        self.checkpoints = attempt(config, told)
        self.saving = Saving(config.run.dir, self.checkpoints, self.learner, self.notice)  # ty: ignore
        Path(config.run.dir).mkdir(exist_ok=True)
        self.phases = Phases(config.run.dir, self.saving.on_boundary)

    def phase(self, step: int, name: str) -> None:
        with self.phases(name):
            if name == "update":
                self.learner.step = step
            if name == "checkpoint":
                self.saving.maybe_save(RunPosition(step, {}, step, 0), last=False)
            if (step, name) == self.at:
                preemption.announce_notice("SIGTERM", self.flag)
            time.sleep(0.002)

    def to(self, last: int) -> float:
        """Runs to step `last`, or to the notice; the seconds from it to the end, 0 without one."""
        try:
            found = self.checkpoints.find()
            self.learner.step = step = found.step if found else 0
            for name in BEFORE:
                self.phase(step, name)
            for _ in range(3 if step else 0):
                self.saving.stepped(self.step_s)  # what it has measured before
            while step < last:
                step += 1
                self.phases.begin(step)
                for name in OF_A_STEP[:-1]:
                    self.phase(step, name)
                self.saving.stepped(self.step_s)
                self.phase(step, "checkpoint")
            self.saving.finish(RunPosition(step, {}, step, 0))
            return 0.0
        except Preempted:
            self.saving.flush()
            return NOTICE_S - self.notice.remaining_s()
        finally:
            self.notice.close()
            self.checkpoints.close()


@pytest.fixture
def told():
    """What the checkpoints say."""
    return []


@pytest.fixture
def config(tmp_path):
    return configure(tmp_path, f"checkpoint.every_steps={EVERY}")


@pytest.fixture
def start(config, tmp_path, told):
    """Starts a run again whose first attempt has ended at step 4."""
    env = {preemption.FLAG_VARIABLE: str(tmp_path / "flag"), "SPOTRL_NOTICE_S": str(NOTICE_S)}
    SmallRun(config, env, told).to(4)
    return lambda *about: SmallRun(config, env, told, *about)


def resumes_from(config) -> int:
    found = again(config, []).find()
    assert holds(found, found.step), "to the bit"
    return found.step


@pytest.mark.parametrize("phase", BEFORE)
def test_before_the_first_step_it_leaves_at_once(start, config, phase):
    seconds = start((4, phase)).to(9)
    assert 0 < seconds < 2 and resumes_from(config) == 4


@pytest.mark.parametrize("step", [5, 6])
@pytest.mark.parametrize("phase", OF_A_STEP)
def test_a_short_step_is_finished_and_saved(start, config, phase, step):
    """Whether a save is due after it or not; in the phase that saves, too."""
    seconds = start((step, phase)).to(9)
    assert 0 < seconds < NOTICE_S - 1 and resumes_from(config) == step


@pytest.mark.parametrize("phase", OF_A_STEP)
def test_a_long_step_is_left_with_what_can_be_saved(start, config, phase):
    """Steps of a minute. Until its update, the weights are those of step 5, which no save was due for."""
    seconds = start((6, phase), 60.0).to(9)
    kept = {"rollout": 5, "grade": 5, "checkpoint": 6}.get(phase, 4)
    assert 0 < seconds < NOTICE_S - 1 and resumes_from(config) == kept
