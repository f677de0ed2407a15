"""What the loop asks of the engines: take weights, sample completions, give the GPUs back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from trainer.algorithm.traces import Prompt, Trace
from trainer.config import Split
from trainer.weights.source import WeightSource


@dataclass(frozen=True)
class SamplingRequest:
    """Prompts to be completed, how, and by which weights. No two asks of a run have the same kind, step and
    groups."""

    kind: Literal["train", "eval", "probe"]
    """What it is for: a step's update, a figure for a person, or the comparison of engine and policy."""
    step: int
    """Step that trains on it; of an evaluation, the step that it comes after."""
    version: int
    """Version of the weights that sample it: the number of steps that had been done when they were taken."""
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
    top_p: float = 1.0
    """Below 1 in evaluations alone: engine and policy use one distribution."""
    begun: Sequence[Trace] = ()
    """Completions of these prompts that older weights began. Those that were cut go on; a prompt whose
    completions have all ended is not sampled."""


class SampledGroups:
    """What becomes of an ask. This one is whole; that of a sampler that overlaps learning may still be
    sampled."""

    def __init__(self, groups: Iterable[list[Trace]]) -> None:
        self._groups = list(groups)

    @property
    def whole(self) -> bool:
        """Whether every group is there, so that `all` does not wait."""
        return True

    def all(self) -> list[Trace]:
        """Waits for every group; returns the traces by group and index, whatever order they came in."""
        traces = [trace for group in self._groups for trace in group]
        return sorted(traces, key=lambda trace: (trace.group, trace.index))


class Sampler(Protocol):
    """Rollout engines, wherever they run."""

    overlaps_learning: bool
    """Whether it samples on GPUs of its own while the learner learns."""

    def load(self, weights: WeightSource) -> None:
        """Brings weights into every engine; what is asked from now on is theirs."""

    def sample(self, ask: SamplingRequest) -> SampledGroups:
        """Starts to sample with the weights that are loaded, which are those of `ask.version`. One that
        overlaps learning returns at once; the others return when all of it is sampled. Every completion draws
        from a seed of its own, so neither order nor batch matters to it."""

    def rest(self) -> None:
        """Gives the GPUs that engines share with the learner to the learner, until the next `load`."""

    def close(self) -> None:
        """Ends what belongs to the sampler alone."""
