"""The real session, checkpoints, storage and metrics around ranks that only pretend to train: starts in seconds.

`python -m tests.loops.standin --config run.yaml` takes the place of `trainer.loops.grpo` in the long fault drill. Its
"training" moves every parameter by a function of the step, so that a step lost, repeated or torn shows in metrics and
weights.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from tests.checkpoint.synthetic import KINDS, cut, whole
from trainer.checkpoint.reader import Found, ShardReader
from trainer.checkpoint.writer import RankStatus, ShardWriter
from trainer.config import RunConfig
from trainer.loops import process
from trainer.loops.process import main
from trainer.run import session
from trainer.run.session import Session

SHAPES = {f"model.layers.{i}.weight": (512, 512) for i in range(8)} | {"model.norm.weight": (511,)}
STEP_S = float(os.environ.get("STANDIN_STEP_S", "0.15"))
COLLAPSES = int(os.environ.get("STANDIN_COLLAPSES", "0"))
"""Step from which on the policy says one thing only; 0: never."""


class Ranks:
    """In place of `trainer.ranks.worker_group.Workers`: all ranks in this process, with real shard writers."""

    def __init__(self, config: RunConfig) -> None:
        self.world_size, self.skipped = config.placement.world_size, 0
        self.full = whole(0, SHAPES)
        self.writers = [ShardWriter(config, rank, self.world_size) for rank in range(self.world_size)]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        return getattr(self, method)(*arguments)

    def fingerprint(self) -> str:
        return "stand-in"

    def named(self, text: str) -> str:
        return ""

    def lengths(self, path: str, split: str, rows: int) -> np.ndarray:
        return np.ones((rows, 2), np.int32)

    def start(self, total_updates: int, found: Found | None) -> dict[str, Any]:
        return {"device_name": "", "image_token_id": 0}

    def update(self, step: int) -> list[float]:
        for number, tensors in enumerate(self.full.values()):
            for kind, tensor in tensors.items():
                tensor.mul_(0.9).add_(torch.sin(tensor * (step + number + len(kind))))
        return [float(sum(tensors["master"].double().sum() for tensors in self.full.values()))]

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> list[float]:
        begun = time.monotonic()
        for writer in self.writers:
            writer.start(step, cut(self.full, writer.rank, self.world_size, SHAPES), {}, keep, send, attempt)
        return [time.monotonic() - begun]

    def send(self, step: int) -> None:
        for writer in self.writers:
            writer.send(step)

    def save_status(self) -> list[RankStatus]:
        return [writer.status() for writer in self.writers]

    def load(self, found: Found) -> None:
        reader = ShardReader(found)
        self.full = {name: {kind: reader.read(kind, name).clone() for kind in KINDS} for name in SHAPES}
        self.step = found.step

    def loaded(self, updates: int, skipped: int) -> None:
        assert updates == self.step


def train(config: RunConfig, run: Session) -> None:
    """The shape of the real loop."""
    norm: dict[str, float] = {"count": 0.0}
    if os.environ.get("STANDIN_FAILS"):
        raise RuntimeError("injected failure")
    step, total = run.resume(norm), config.run.max_steps
    while step < total:
        step += 1
        run.phases.begin(step, total)
        for phase in ("rollout", "grade", "update", "sync"):
            with run.phases(phase):
                time.sleep(STEP_S / 4)
        with run.phases("update"):
            (value,) = run.workers.all("update", step)
        norm["count"] += 1
        stats = {"loss/total": value, "reward/mean": norm["count"]}
        if COLLAPSES:
            gone = step >= COLLAPSES
            stats |= {"entropy/mean": 0.02 if gone else 1.2, "group/zero_std_fraction": 1.0 if gone else 0.3}
        run.log(step, stats, [])
        with run.phases("checkpoint"):
            run.saving.maybe_save(step, total, norm, step, None)
    run.finish(step, total, norm, step)


if __name__ == "__main__":
    session.Workers = Ranks
    for name in ("connect", "precheck"):
        setattr(process, name, lambda config: None)
    main(train, lambda config, rows: config.run.max_steps)
