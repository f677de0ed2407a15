"""Rewards that depend on a completion's form alone, and the state that rewards carry from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from trainer.algorithm.advantages import RewardParts, RunningNorm
from trainer.algorithm.traces import Outcome, Trace
from trainer.config import RunConfig

GRADED = ("reward/accuracy", "reward/format")
"""Names of the rewards that the grader gives; the rewards for form come after them."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass
class LoopState(RunningNorm):
    """State besides the weights that a step passes on to the next one, with the running statistics of the
    rewards."""

    kl_coef: float = 0.0
    """KL coefficient of the next step."""
    prompts: int = 0
    """Number of prompts that were sampled so far."""

    @classmethod
    def resume(cls, saved: Mapping[str, float], config: RunConfig, step: int) -> LoopState:
        """The state after `step`.

        saved: `state` of the step's checkpoint. A checkpoint of an older version may lack fields; a fresh run
        has none.
        """
        loop_state = cls()
        for field in fields(cls):
            setattr(loop_state, field.name, saved.get(field.name, field.default))
        if not all(map(math.isfinite, (loop_state.count, loop_state.mean, loop_state.m2))):
            # The checkpoint is of a version that let rewards in that are not finite.
            loop_state.count = 0.0
            loop_state.mean = 0.0
            loop_state.m2 = 0.0
        loop_state.kl_coef = loop_state.kl_coef or config.algorithm.kl_coef
        loop_state.prompts = loop_state.prompts or step * config.rollout.prompts_per_step
        return loop_state

    def stepped(
        self, config: RunConfig, metrics: Mapping[str, float], prompts: int, completions: int
    ) -> dict[str, float]:
        """Moves on after a step with these metrics; returns what the step itself had, as metrics.

        prompts: number that was sampled. completions: number that was trained on.
        """
        had = {}
        self.prompts += prompts
        target = config.algorithm.kl_target
        if target:
            had["kl/coef"] = self.kl_coef
            kl = metrics.get("kl/mean", math.nan)
            self.kl_coef = next_kl_coef(self.kl_coef, kl, target, config.algorithm.kl_horizon, completions)
        return had

    def state(self) -> dict[str, float]:
        """The part of it that a checkpoint keeps."""
        return asdict(self)


def weighted_rewards(outcomes: Sequence[Outcome], config: RunConfig) -> RewardParts:
    """The grader's rewards, with the weights of the configuration."""
    parts = torch.tensor([[o.accuracy, o.format] for o in outcomes], dtype=torch.float64)
    weights = [config.rewards.accuracy_weight, config.rewards.format_weight]
    return RewardParts(GRADED, parts.reshape(-1, 2), torch.tensor(weights, dtype=torch.float64))


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """Penalty of long completions, [N] (DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to (1 - buffer) max_tokens, and falls linearly to -1 at max_tokens.
    """
    start = max_tokens * (1 - buffer)
    return -((lengths.double() - start) / (max_tokens * buffer)).clamp(0, 1)


def length_reward(lengths: Tensor, groups: Tensor, correct: Tensor) -> Tensor:
    """Reward of short completions in their group, [N] (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    It falls linearly from 0.5 for a group's shortest completion to -0.5 for its longest. A completion
    that is not correct gets 0 at most. A group whose completions are equally long gets 0.
    """
    out = torch.zeros(len(lengths), dtype=torch.float64)
    for group in groups.unique():
        members = groups == group
        tokens = lengths[members].double()
        shortest = tokens.min()
        longest = tokens.max()
        if longest > shortest:
            value = 0.5 - (tokens - shortest) / (longest - shortest)
            out[members] = torch.where(correct[members], value, value.clamp(max=0))
    return out


def repetition_penalty(token_ids: Sequence[int], n: int) -> float:
    """Minus the share of n-grams of tokens that occurred before, 0 to -1 (arXiv 2502.03373, appendix C.2)."""
    total = len(token_ids) - n + 1
    if total < 1:
        return 0.0
    different = set()
    for start in range(total):
        different.add(tuple(token_ids[start : start + n]))
    return len(different) / total - 1


def tag_share(text: str) -> float:
    """Share of the four tags that occur exactly once in `text`."""
    once = sum(text.count(tag) == 1 for tag in TAGS)
    return once / len(TAGS)


def add_form_rewards(
    by_grader: RewardParts, traces: Sequence[Trace], groups: Tensor, config: RunConfig
) -> RewardParts:
    """The grader's rewards, followed by the rewards for form that have a weight."""
    weights = config.rewards
    algorithm = config.algorithm
    lengths = torch.tensor([len(trace.learned) for trace in traces])

    names: list[str] = []
    further: list[float] = []
    columns: list[Tensor] = []

    def add(name: str, weight: float, values: Tensor) -> None:
        names.append(name)
        further.append(weight)
        columns.append(values[:, None])

    if weights.tags_weight:
        values = torch.tensor([tag_share(trace.text) for trace in traces], dtype=torch.float64)
        add("reward/tags", weights.tags_weight, values)
    if weights.length_weight:
        correct = by_grader.parts[:, 0] > 0
        add("reward/length", weights.length_weight, length_reward(lengths, groups, correct))
    if weights.repetition_weight:
        ngram = weights.repetition_ngram
        repeated = [repetition_penalty(trace.tokens[trace.learned].tolist(), ngram) for trace in traces]
        add("reward/repetition", weights.repetition_weight, torch.tensor(repeated, dtype=torch.float64))
    if algorithm.overlong_buffer and algorithm.overlong_penalty:
        values = overlong_penalty(lengths, config.rollout.max_tokens, algorithm.overlong_buffer)
        add("reward/overlong", algorithm.overlong_penalty, values)

    return RewardParts(
        (*by_grader.names, *names),
        torch.cat([by_grader.parts, *columns], 1),
        torch.cat([by_grader.weights, by_grader.weights.new_tensor(further)]),
    )


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient after a step of `samples` completions whose KL was `kl` (Ziegler et al., arXiv
    1909.08593).

    A KL that is not finite, because updates were skipped, leaves the coefficient as it is.
    """
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
