"""Plain records that flow through the run: Prompt -> Sample -> Outcome. No behaviour, no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]


@dataclass(frozen=True)
class Prompt:
    """One row as it is asked at one step."""

    group: int
    """Position in the step's batch; the samples of one prompt share it. Never found by comparing texts."""
    row: int
    """Index of the row in the dataset."""
    seed: int
    """Base of the seeds of its samples: hash of (run seed, step, row, epoch)."""


@dataclass(frozen=True)
class Sample:
    """One completion of the engine."""

    group: int
    row: int
    index: int
    """Which of the group's samples."""
    prompt_token_ids: list[int]
    """Image placeholders expanded."""
    token_ids: list[int]
    """The completion's tokens, the end token included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each of them under the engine, after temperature."""
    text: str
    """The completion, special tokens left out."""
    finished: bool
    """False where max_tokens cut it."""
    weight_version: int
    """Number of updates that the engine's weights had seen."""


@dataclass(frozen=True)
class Outcome:
    """What the grader says of one sample."""

    verdict: Verdict
    accuracy: float
    """1.0 for `correct`, else 0.0; a user's reward function may return any finite number."""
    format: float
    """1.0 for exactly one think and one answer block, else 0.0."""
    reward: float
    """accuracy_weight * accuracy + format_weight * format."""
