"""Rewards that follow from a completion's form alone, and what of the rewards a run carries from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm.advantages import Rewards, RunningNorm
from trainer.algorithm.traces import Outcome, Trace
from trainer.config import RunConfig

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass
class Carried(RunningNorm):
    """What a step leaves to the next besides the weights: the running statistics of the rewards, and these."""

    kl_coef: float = 0.0
    """Weight of the KL in the next step."""
    prompts: int = 0
    """How many prompts the run has asked so far."""

    @classmethod
    def resume(cls, saved: Mapping[str, float], config: RunConfig, step: int) -> Carried:
        """The state after `step`.

        saved: `state` of its checkpoint. That of an older version may lack fields, a fresh run has none of them.
        """
        carried = cls()
        for field in fields(cls):
            setattr(carried, field.name, saved.get(field.name, field.default))
        carried.kl_coef = carried.kl_coef or config.algorithm.kl_coef
        carried.prompts = carried.prompts or step * config.rollout.prompts_per_step
        return carried

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return asdict(self)


def graded(outcomes: Sequence[Outcome], config: RunConfig) -> Rewards:
    """What the grader gave, by name, with the weights."""
    return Rewards(
        ("reward/accuracy", "reward/format"),
        torch.tensor([[o.accuracy, o.format] for o in outcomes], dtype=torch.float64).reshape(-1, 2),
        torch.tensor([config.rewards.accuracy_weight, config.rewards.format_weight], dtype=torch.float64),
    )


def overlong(lengths: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """0 up to (1 - buffer) max_tokens, then linear to -1 at max_tokens; [N] (DAPO, arXiv 2503.14476, eq. 13)."""
    start = max_tokens * (1 - buffer)
    return -((lengths.double() - start) / (max_tokens * buffer)).clamp(0, 1)


def brevity(lengths: Tensor, groups: Tensor, correct: Tensor) -> Tensor:
    """0.5 for a group's shortest completion, linear to -0.5 for its longest, at most 0 for one that is not correct; 0
    where all are as long; [N] (Kimi k1.5, arXiv 2501.12599, section 2.3.3)."""
    out = torch.zeros(len(lengths), dtype=torch.float64)
    for group in groups.unique():
        members = groups == group
        own = lengths[members].double()
        least, most = own.min(), own.max()
        if most > least:
            value = 0.5 - (own - least) / (most - least)
            out[members] = torch.where(correct[members], value, value.clamp(max=0))
    return out


def repetition(token_ids: Sequence[int], n: int) -> float:
    """Minus the share of n-grams of tokens that stood before, 0 to -1 (arXiv 2502.03373, appendix C.2)."""
    total = len(token_ids) - n + 1
    if total < 1:
        return 0.0
    return len({tuple(token_ids[i : i + n]) for i in range(total)}) / total - 1


def tags(text: str) -> float:
    """Share of the four tags that stand exactly once."""
    return sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS)


def shaped(rewards: Rewards, traces: Sequence[Trace], groups: Tensor, config: RunConfig) -> Rewards:
    """The grader's rewards and those of the form that have a weight, in this order."""
    r, algorithm, longest = config.rewards, config.algorithm, config.rollout.max_tokens
    lengths = torch.tensor([len(trace.completion) for trace in traces])
    double: Any = {"dtype": torch.float64}
    further: list[tuple[str, float, Callable[[], Tensor]]] = [
        ("reward/tags", r.tags_weight, lambda: torch.tensor([tags(trace.text) for trace in traces], **double)),
        ("reward/length", r.length_weight, lambda: brevity(lengths, groups, rewards.parts[:, 0] > 0)),
        ("reward/repetition", r.repetition_weight,
         lambda: torch.tensor([repetition(t.completion.tolist(), r.repetition_ngram) for t in traces], **double)),
        ("reward/overlong", algorithm.overlong_penalty * bool(algorithm.overlong_buffer),
         lambda: overlong(lengths, longest, algorithm.overlong_buffer)),
    ]  # fmt: skip
    on = [(name, weight, values()) for name, weight, values in further if weight]
    return Rewards(
        (*rewards.names, *(name for name, _, _ in on)),
        torch.cat([rewards.parts, *(values[:, None] for _, _, values in on)], 1),
        torch.cat([rewards.weights, rewards.weights.new_tensor([weight for _, weight, _ in on])]),
    )


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient after a step of `samples` completions whose KL was `kl` (Ziegler et al., arXiv 1909.08593).

    A KL that is not finite, of updates that were skipped, leaves it as it is.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
