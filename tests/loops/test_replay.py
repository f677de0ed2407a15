"""The loop over the rollout log: a restart repeats updates and samples, grades and syncs no more than it
must.

The loop, the log and the prompts are real; the ranks are a number that updates change and completions depend
on.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer import config as c
from trainer.algorithm.traces import Outcome, completed_trace, continue_trace
from trainer.checkpoint.manifest import CorruptCheckpoint
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.data.prompt_stream import PromptStream
from trainer.learning.distributed import Logprobs
from trainer.loops import grpo
from trainer.run.probe import Probe
from trainer.run.session import ResumedRun, Session, needed_logs
from trainer.sampling.sampler import SampledGroups

STEPS = 8
SAVED = 2
KILLED = 6


class Killed(BaseException):
    """In place of SIGKILL."""


class Model:
    """Learner and sampler: a number that updates change and completions depend on."""

    overlaps_learning = False

    def __init__(self, weights: int, dies_in: int) -> None:
        self.value = weights
        self.engine = None
        self.calls = []
        self.tokens = 0
        self.step = 0
        self.dies_in = dies_in

    def weights(self, version):
        return version, self.value

    def load(self, weights):
        self.calls.append(("sync", self.step))
        self.version, self.engine = weights

    def rest(self):
        pass

    def sample(self, ask):
        assert (ask.version, self.engine) == (self.version, self.value), "sampled with old weights"
        self.calls.append(("generate", ask.step))
        ended = {trace.group for trace in ask.begun} - {t.group for t in ask.begun if t.end == "cut"}
        groups = []
        for prompt in ask.prompts:
            if prompt.group not in ended:
                begun = {t.index: t for t in ask.begun if t.group == prompt.group}
                groups.append(self.complete(prompt, ask.samples_per_prompt, begun))
        return SampledGroups(groups)

    def complete(self, prompt, count, begun):
        """Completions of 1 to 19 tokens, a number that only the first version decides."""
        traces = []
        for index in sorted(i for i, t in begun.items() if t.end == "cut") if begun else range(count):
            so_far = begun.get(index)
            dice = random.Random(f"{self.engine} {prompt.seed} {index} {so_far and len(so_far.segments)}")
            left = random.Random(f"{prompt.seed} {index}").randrange(1, 20)
            left -= len(so_far.completion) if so_far else 0
            now = min(left, prompt.cut or left)
            ids = [dice.randrange(1000) for _ in range(now)]
            self.tokens += now
            logprobs = [dice.random() for _ in ids]
            about: Any = {"group": prompt.group, "row": prompt.row, "index": index, "text": str(ids)}
            about |= {"version": self.version, "end": "stop" if now == left else "cut"}
            asked = so_far.tokens if so_far else [7, 7]
            piece = completed_trace(asked, ids, logprobs=logprobs, **about)
            traces.append(continue_trace(so_far, piece) if so_far else piece)
        return traces

    def logprobs(self, traces, split, *, old, reference):
        values = [np.zeros(len(trace.learned), np.float32) for trace in traces]
        judged = [np.cos(trace.completion.astype(np.float32)) for trace in traces]
        self.calls += [("judge", self.step)] * reference
        return Logprobs(values if old else None, judged if reference else None)

    def update(self, batch, kl_coef):
        if self.step == self.dies_in:
            raise Killed
        digest = zlib.crc32(str(self.value).encode())
        for trace, advantages in zip(batch.traces, batch.advantages, strict=True):
            for array in (trace.tokens, trace.learned, trace.logprobs, advantages):
                digest = zlib.crc32(array.tobytes(), digest)
        self.value = digest
        return {"loss/total": float(digest)}


class Phases:
    def __init__(self, run) -> None:
        self.run = run

    def begin(self, step, total):
        self.run.model.step = step

    def __call__(self, name):
        return contextlib.nullcontext()


class Run:
    """What the loop asks of a session."""

    due, log_graded = staticmethod(Session.due), Session.log_graded
    ask_teacher = Session.ask_teacher

    def __init__(self, config, saved=(0, 0, None, ()), dies_in=0) -> None:
        self.config = config
        self.train_rows = list(range(40))
        self.saved = saved
        self.stream = PromptStream(self.train_rows, config.rows_per_step, config.run.seed)
        self.phases = Phases(self)
        self.rows = SimpleNamespace(prompt_tokens=lambda split: None)
        self.train_set = None
        self.lines = {}
        self.saves = {}
        self.model = self.learner = self.sampler = Model(saved[1], dies_in)
        self.probe = Probe(config, self.rows, self.learner)  # ty: ignore[invalid-argument-type]
        self.rollouts = RolloutLog(config, "rows")
        stats = {"reward/algebra_fraction": 0.25, "perf/grader_restarts": 0.0}
        self.grader = SimpleNamespace(scorer=SimpleNamespace(stats=lambda: stats))
        self.step_log = SimpleNamespace(metrics=SimpleNamespace(log=lambda *_: None))
        self.checkpoints = SimpleNamespace(retention=SimpleNamespace(floor=0))

    def resume(self):
        step, _, state, ahead = self.saved
        self.rollouts.open(step, ahead)
        return ResumedRun(step, state or {})

    def begin(self, step, total):
        self.phases.begin(step, total)

    def check_first_sync(self, version):
        pass

    def score(self, samples):
        self.model.calls.append(("grade", self.model.step))
        return [Outcome("correct", 1.0, 0.0, len(t.completion) / 7) for t in samples]

    def log(self, step, stats, samples, shown):
        self.lines[step] = stats

    def save(self, step, total, updates, loop_state, score):
        ahead = needed_logs(self.config, step, total)
        assert self.rollouts.durable(ahead), "saved before what was sampled ahead of it was logged"
        self.saves[step] = (step, self.model.value, dict(loop_state), ahead)

    def finish(self, step, updates, loop_state):
        self.rollouts.close()


def train(run: Run) -> Run:
    grpo.train(run.config, run)  # ty: ignore[invalid-argument-type]
    return run


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(
        grpo, "evaluate", lambda config, run, step: {"eval/accuracy": float(run.model.engine)}
    )
    return c.RunConfig(
        run=c.Run(name="replay", dir=str(tmp_path), max_steps=STEPS),
        rollout=c.Rollout(prompts_per_step=4, samples_per_prompt=2),
        algorithm=c.Algorithm(samples_per_update=4, epochs=2, normalize_reward=True, kl_coef=0.0),
        evaluation=c.Evaluation(every_steps=4, max_samples=2),
        logging=c.Logging(samples_per_step=0),
    )


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_a_restart_repeats_updates_and_nothing_else(config, tmp_path, staleness):
    config = c.override(config, [f"rollout.staleness={staleness}"])
    killed_in = KILLED if staleness == 0 else KILLED - 2
    calm = train(Run(c.override(config, [f"run.dir={tmp_path}/calm"])))
    killed = Run(config, dies_in=killed_in)
    with pytest.raises(Killed):
        train(killed)
    again = train(Run(config, killed.saves[SAVED]))
    assert again.model.value == calm.model.value != 0
    assert {**killed.lines, **again.lines} == calm.lines
    calls = again.model.calls
    logged = min(killed_in + staleness, STEPS)
    assert [step for name, step in calls if name == "generate"] == list(range(logged + 1, STEPS + 1))
    assert [name for name, _ in calls].count("grade") == STEPS - logged
    # At the start; for the evaluations after steps 4 and 8; after every step whose weights sample another.
    samples = [step for step in range(SAVED, STEPS) if logged < step + 1 + staleness <= STEPS]
    assert [step for name, step in calls if name == "sync"] == [0, *sorted({4, 8, *samples})]
    assert again.rollouts.metrics()["perf/replayed_completions"] == (logged - SAVED) * config.samples_per_step


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("options", [[], ["rewards.accuracy_weight=0", "rewards.format_weight=0"]])
def test_a_restart_asks_the_teacher_nothing_twice(config, tmp_path, staleness, options):
    """Dies in the update of step 6, whose completions the teacher has judged."""
    options = [*options, "algorithm.teacher=some/teacher", f"rollout.staleness={staleness}"]
    config = c.override(config, options)
    c.validate(config)
    calm = train(Run(c.override(config, [f"run.dir={tmp_path}/calm"])))
    killed = Run(config, dies_in=KILLED)
    with pytest.raises(Killed):
        train(killed)
    again = train(Run(config, killed.saves[SAVED]))
    assert again.model.value == calm.model.value != 0
    assert {**killed.lines, **again.lines} == calm.lines
    assert all(0 < line["teacher/likelier_fraction"] < 1 for line in calm.lines.values())
    for run, first in ((calm, 1), (again, KILLED + 1)):
        judged = [step for name, step in run.model.calls if name == "judge"]
        assert judged == list(range(first, STEPS + 1))


def versions(config) -> dict[int, tuple[int, int]]:
    """By step: the oldest and the newest version of the weights that sampled what is logged of it."""
    log = RolloutLog(config, "rows")
    found = {}
    for step in log.open(0):
        graded = log.read(step)
        assert graded is not None
        (found[step],) = {trace.versions for trace in graded.traces}
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 8])
def test_every_step_is_sampled_by_the_version_that_the_schedule_names(config, staleness):
    config = c.override(config, [f"rollout.staleness={staleness}", "run.max_steps=12"])
    run = train(Run(config))
    asked = [step for name, step in run.model.calls if name == "generate"]
    assert asked == list(range(1, 13)), "each once"
    assert versions(config) == {s: (max(0, s - 1 - staleness),) * 2 for s in range(1, 13)}
    behind = [line.get("rollout/staleness_max", 0.0) for line in run.lines.values()]
    assert behind == [min(s - 1, staleness) for s in range(1, 13)]
    measured = ["mismatch/kl" in line for line in run.lines.values()]
    assert measured == [0 < staleness <= 12 - s for s in range(1, 13)], "kernels, where a step is ahead"


def test_a_checkpoint_without_the_logs_that_it_needs_is_not_resumed_from(config):
    config = c.override(config, ["rollout.staleness=2"])
    killed = Run(config, dies_in=5)
    with pytest.raises(Killed):
        train(killed)
    (killed.rollouts.place.folder / "step-00000006.npz").unlink()
    with pytest.raises(CorruptCheckpoint, match="the completions of step 6, which older weights sampled"):
        Run(config, killed.saves[4]).resume()
    calm = train(Run(c.override(config, [f"run.dir={config.run.dir}/calm"])))
    again = train(Run(config, killed.saves[3]))  # its own version samples step 6
    assert again.model.value == calm.model.value
    assert [step for name, step in again.model.calls if name == "generate"] == [6, 7, 8]


def test_a_restart_after_the_last_step_samples_nothing(config):
    done = train(Run(config))
    again = train(Run(config, done.saves[STEPS]))
    assert again.model.value == done.model.value and again.model.calls == []


def test_while_workers_sample_what_was_asked_they_can_be_probed_with_the_learners_weights(
    config, monkeypatch
):
    """Two steps ahead no step of the 8 is sampled with versions 6 and 7, and they are loaded nevertheless."""
    monkeypatch.setattr(Model, "overlaps_learning", True)
    config = c.override(config, ["rollout.staleness=2", "evaluation.every_steps=0"])
    monkeypatch.setattr(SampledGroups, "whole", False)
    monkeypatch.setattr(Run, "save", lambda *_: None)  # waits for the logs of what was asked
    run = train(Run(config))
    assert [step for name, step in run.model.calls if name == "sync"] == list(range(STEPS))
