"""The real session, checkpoints, storage and metrics around ranks that only pretend to train: starts in
seconds.

`python -m tests.loops.standin --config run.yaml` takes the place of `trainer.loops.grpo` in the long fault
drill. Its "training" moves every parameter by a function of the step, so that a step lost, repeated or torn
shows in metrics and weights.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import ray
import torch

from tests.checkpoint.synthetic import KINDS, cut, whole
from trainer.algorithm.scheduling import PassCost
from trainer.checkpoint.shard_reader import FoundCheckpoint, ShardReader
from trainer.checkpoint.writer import RankStatus, ShardWriter
from trainer.config import RunConfig, Split
from trainer.learning.learner_part import LearnerFacts
from trainer.loops import process
from trainer.loops.process import main
from trainer.run import session
from trainer.run.session import Session

SHAPES = {f"model.layers.{i}.weight": (512, 512) for i in range(8)} | {"model.norm.weight": (511,)}
ACTORS = int(os.environ.get("STANDIN_ACTORS", "0"))
"""Ray actors that every update calls; 0: Ray is not used."""
STEP_S = float(os.environ.get("STANDIN_STEP_S", "0.15"))
COLLAPSES = int(os.environ.get("STANDIN_COLLAPSES", "0"))
"""Step from which on the policy says one thing only; 0: never."""


class StandinRanks:
    """Ranks that are there already and know how long every row is."""

    def __init__(self, config: RunConfig) -> None:
        self.world_size = config.placement.world_size

    def start(self) -> None:
        pass

    def named(self, message: str) -> str:
        return ""

    def first(self, method: Any) -> str:
        return "stand-in"

    def each(self, method: Any, pieces: list[tuple[Split, int, int]]) -> list[np.ndarray]:
        return [np.ones((stop - start, 2), np.int32) for _, start, stop in pieces]

    def all(self, method: Any, *arguments: Any) -> list[Any]:
        return []


class StandinLearner:
    """A learner whose ranks all live in this process, with real shard writers."""

    facts = LearnerFacts("", 0, 0, 0, PassCost())
    skipped = 0

    def __init__(self, config: RunConfig, ranks: StandinRanks) -> None:
        self.world_size = ranks.world_size
        self.full = whole(0, SHAPES)
        self.writers = [ShardWriter(config, rank, self.world_size) for rank in range(self.world_size)]

    def start(self, total_updates: int, found: FoundCheckpoint | None) -> None:
        pass

    def train(self, step: int) -> float:
        for number, tensors in enumerate(self.full.values()):
            for kind, tensor in tensors.items():
                tensor.mul_(0.9).add_(torch.sin(tensor * (step + number + len(kind))))
        return float(sum(tensors["master"].double().sum() for tensors in self.full.values()))

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        begun = time.monotonic()
        for writer in self.writers:
            writer.start(step, cut(self.full, writer.rank, self.world_size, SHAPES), {}, keep, send, attempt)
        return time.monotonic() - begun

    def send(self, step: int) -> None:
        for writer in self.writers:
            writer.send(step)

    def save_status(self) -> list[RankStatus]:
        return [writer.status() for writer in self.writers]

    def load(self, found: FoundCheckpoint) -> None:
        reader = ShardReader(found)
        self.full = {name: {kind: reader.read(kind, name).clone() for kind in KINDS} for name in SHAPES}
        assert found.state["updates"] == found.step


class StandinSampler:
    """A `Sampler` that nobody asks."""

    def __init__(self, config: RunConfig, ranks: StandinRanks) -> None:
        pass

    def start(self) -> None:
        pass


class Idle:
    """An actor that a rank's process stands for."""

    def update(self, step: int) -> int:
        return step


def train(config: RunConfig, run: Session) -> None:
    """The shape of the real loop."""
    actors = [ray.remote(num_cpus=1)(Idle).remote() for _ in range(ACTORS)]
    if os.environ.get("STANDIN_FAILS"):
        raise RuntimeError("injected failure")
    learner: Any = run.learner
    resumed, total = run.resume(), config.run.max_steps
    step, carried = resumed.step, {"count": 0.0} | resumed.loop_state
    while step < total:
        step += 1
        run.phases.begin(step, total)
        for phase in ("rollout", "grade", "update", "sync"):
            with run.phases(phase):
                time.sleep(STEP_S / 4)
        with run.phases("update"):
            value = learner.train(step)
            if actors:  # with none, the call would start a Ray of its own
                assert ray.get([actor.update.remote(step) for actor in actors]) == [step] * ACTORS
        carried["count"] += 1
        stats = {"loss/total": value, "reward/mean": carried["count"]}
        if COLLAPSES:
            gone = step >= COLLAPSES
            stats |= {"entropy/mean": 0.02 if gone else 1.2, "group/zero_std_fraction": 1.0 if gone else 0.3}
        run.log(step, stats, [])
        run.save(step, total, step, carried)
    run.finish(step, step, carried)


if __name__ == "__main__":
    session.RayRanks = StandinRanks
    session.DistributedLearner = StandinLearner
    session.Colocated = StandinSampler
    for name in ("precheck", "check_device", *([] if ACTORS else ["connect"])):
        setattr(process, name, lambda config: None)
    main(train, lambda config, rows: config.run.max_steps)
