"""What the loop asks of the policy: score traces, learn from them, hand out the weights, save and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.scheduling import KEYS, PassCost
from trainer.algorithm.traces import Trace
from trainer.checkpoint.shard_reader import FoundCheckpoint
from trainer.checkpoint.writer import RankStatus
from trainer.config import Split
from trainer.weights.source import WeightSource


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the learned tokens of traces, [T] float32 per trace; None where they were not
    asked for."""

    old: list[np.ndarray] | None = None
    """Under the policy as it stands."""
    reference: list[np.ndarray] | None = None
    """Under the frozen reference."""


@dataclass(frozen=True)
class LearnerFacts:
    """What the ranks know of model and device once they have loaded."""

    device_name: str
    """The GPU's name; empty on CPU."""
    image_token_id: int
    """The id of an image's placeholder; -1 where the model reads text only."""
    micro_batch_tokens: int
    """Budget of one training pass."""
    logprob_tokens: int
    """Budget of one scoring pass."""
    cost: PassCost
    """What a pass costs, for the schedule."""
    update_keys: float = KEYS
    """Keys per token of a training pass."""
    logprob_keys: float = KEYS
    """Keys per token of a scoring pass."""


class Learner(Protocol):
    """The policy and what trains it. Every method returns when it is done on all ranks."""

    facts: LearnerFacts

    def logprobs(self, traces: Sequence[Trace], split: Split, *, old: bool, reference: bool) -> Logprobs:
        """Scores traces whose rows stand in `split`."""

    def update(self, batch: TrainBatch, kl_coef: float = 0.0) -> dict[str, float]:
        """Makes one optimizer step over the whole batch; returns its metrics.

        kl_coef: weight of the KL to the reference in the loss. Raises ConfigError when too many updates in a
        row had a gradient that was not finite.
        """

    def weights(self, version: int) -> WeightSource:
        """The policy's weights as they stand, under this version number."""

    @property
    def skipped(self) -> int:
        """How many updates of the run were skipped because their gradient was not finite."""

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        """Starts to write the checkpoint of `step`; returns the seconds that training stood still for it.

        keep: steps whose local files stay. send: upload it as soon as it is written. attempt: into whose
        folder.
        """

    def send(self, step: int) -> None:
        """Starts to upload what was written of `step`."""

    def save_status(self) -> list[RankStatus]:
        """What every rank has written and uploaded. Raises CheckpointError if one could not write."""

    def load(self, found: FoundCheckpoint) -> None:
        """Takes over a committed checkpoint. Raises CorruptCheckpoint, before any rank resumes from it."""
