"""The loop over the rollout log: a restart repeats updates and samples, grades and syncs no more than it must.

The loop, the log and the prompts are real; the ranks are a number that updates change and completions depend on.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from types import SimpleNamespace

import pytest

from trainer import config as c
from trainer.algorithm.records import Outcome, Sample
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.data.prompt_stream import PromptStream
from trainer.loops import grpo
from trainer.run.session import Session

STEPS, SAVED, KILLED = 8, 2, 6


class Killed(BaseException):
    """In place of SIGKILL."""


class Ranks:
    def __init__(self, weights: int, dies_in: int) -> None:
        self.weights, self.engine, self.calls, self.step, self.dies_in = weights, None, [], 0, dies_in

    def all(self, method, *arguments):
        self.calls.append((method, self.step))
        if method == "sync":
            self.engine = self.weights

    def generate(self, prompts, lengths, samples_per_prompt, temperature, upcoming):
        assert self.engine == self.weights, "sampled with old weights"
        self.calls.append(("generate", self.step))
        samples = []
        for prompt in prompts:
            for index in range(samples_per_prompt):
                dice = random.Random(f"{self.engine} {prompt.seed} {index}")
                ids = [dice.randrange(1000) for _ in range(dice.randrange(1, 20))]
                logprobs = [dice.random() for _ in ids]
                samples.append(
                    Sample(prompt.group, prompt.row, index, [7, 7], ids, logprobs, str(ids), True, self.step)
                )
        return samples

    def with_logprobs(self, items, old, reference):
        return items

    def update(self, items, kl_coef):
        if self.step == self.dies_in:
            raise Killed
        self.weights = zlib.crc32(repr((self.weights, items)).encode())
        return {"loss/total": float(self.weights)}


class Phases:
    def __init__(self, run) -> None:
        self.run = run

    def begin(self, step, total):
        self.run.workers.step = step

    def __call__(self, name):
        return contextlib.nullcontext()


class Run:
    """What the loop asks of a session."""

    due, keep = staticmethod(Session.due), Session.keep

    def __init__(self, config, saved=(0, 0, None), dies_in=0) -> None:
        self.config, self.rows, self.saved = config, list(range(40)), saved
        self.stream = PromptStream(self.rows, config.rows_per_step, config.run.seed)
        self.phases = Phases(self)
        self.prompt_tokens, self.train_set, self.lines, self.saves = None, None, {}, {}
        self.workers, self.rollouts = Ranks(saved[1], dies_in), RolloutLog(config, "rows")
        self.rewards = SimpleNamespace(stats=lambda: {"reward/algebra_fraction": 0.25, "perf/grader_restarts": 0.0})
        self.metrics, self.saving = SimpleNamespace(log=lambda *_: None), self
        self.checkpoints = SimpleNamespace(floor=0)

    def resume(self, norm):
        step, _, state = self.saved
        norm.update(state or {})
        self.rollouts.open(step)
        return step

    def begin(self, step, total):
        self.phases.begin(step, total)

    def check_first_sync(self):
        pass

    def score(self, samples):
        self.workers.calls.append(("grade", self.workers.step))
        return [Outcome("correct", 1.0, 0.0, len(s.token_ids) / 7) for s in samples]

    def log(self, step, stats, samples, shown):
        self.lines[step] = stats

    def maybe_save(self, step, total, norm, updates, score):
        self.saves[step] = (step, self.workers.weights, dict(norm))

    def finish(self, step, total, norm, updates):
        self.rollouts.close()


def train(run: Run) -> Run:
    grpo.train(run.config, run)  # ty: ignore[invalid-argument-type]
    return run


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "evaluate", lambda config, run: {"eval/accuracy": float(run.workers.engine)})
    return c.RunConfig(
        run=c.Run(name="replay", dir=str(tmp_path), max_steps=STEPS),
        rollout=c.Rollout(prompts_per_step=4, samples_per_prompt=2),
        algorithm=c.Algorithm(samples_per_update=4, epochs=2, normalize_reward=True, kl_coef=0.0),
        evaluation=c.Evaluation(every_steps=4, max_samples=2),
        logging=c.Logging(samples_per_step=0),
    )


def test_a_restart_repeats_updates_and_nothing_else(config, tmp_path):
    calm = train(Run(c.override(config, [f"run.dir={tmp_path}/calm"])))
    killed = Run(config, dies_in=KILLED)
    with pytest.raises(Killed):
        train(killed)
    again = train(Run(config, killed.saves[SAVED]))
    assert again.workers.weights == calm.workers.weights != 0
    assert {**killed.lines, **again.lines} == calm.lines
    calls = again.workers.calls
    assert [step for name, step in calls if name == "generate"] == list(range(KILLED + 1, STEPS + 1))
    assert [step for name, step in calls if name == "grade"] == list(range(KILLED + 1, STEPS + 1))
    # At the start; for the evaluation after step 4; after the last logged step; and from there on after every step.
    assert [step for name, step in calls if name == "sync"] == [0, 4, *range(KILLED, STEPS + 1)]
    assert again.rollouts.replayed == (KILLED - SAVED) * config.samples_per_step
