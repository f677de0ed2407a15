"""What the loop asks of the engines: take weights, sample completions, give the GPUs back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainer.algorithm.traces import Prompt, Trace
from trainer.config import Split
from trainer.weights.source import WeightSource


@dataclass(frozen=True)
class Ask:
    """Prompts to be completed, and how."""

    prompts: Sequence[Prompt]
    split: Split
    """Where the prompts' rows stand."""
    prompt_tokens: np.ndarray
    """Tokens of every row's prompt, [rows]; long prompts are dealt out first."""
    samples_per_prompt: int
    temperature: float
    max_tokens: int
    """Longest completion."""
    upcoming: Sequence[Prompt] = ()
    """Prompts of the training split that will be asked next: their images are decoded meanwhile."""


class SampledGroups:
    """Groups of traces, which come as their last completion ends. Iterate, or take `all` of them."""

    def __init__(self, groups: Iterator[list[Trace]]) -> None:
        self._groups = groups

    def __iter__(self) -> Iterator[list[Trace]]:
        return self._groups

    def all(self) -> list[Trace]:
        """Waits for every group; returns the traces by group and index, whatever order they came in."""
        traces = [trace for group in self._groups for trace in group]
        return sorted(traces, key=lambda trace: (trace.group, trace.index))


class Sampler(Protocol):
    """Rollout engines, wherever they run."""

    def load(self, weights: WeightSource) -> None:
        """Brings weights into every engine; what is sampled from now on is theirs."""

    def sample(self, ask: Ask) -> SampledGroups:
        """Starts to sample. Every completion draws from a seed of its own, so neither order nor batch matters
        to it."""

    def rest(self) -> None:
        """Gives the GPUs that engines share with the learner to the learner, until the next `load`."""

    def close(self) -> None:
        """Ends what belongs to the sampler alone."""
