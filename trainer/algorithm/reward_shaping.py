"""Rewards that depend on a completion's form alone, and the state that rewards carry from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from trainer.algorithm.advantages import RewardParts, RunningNorm
from trainer.algorithm.traces import Outcome
from trainer.config import RunConfig

GRADED = ("reward/accuracy", "reward/format")
"""Names of the rewards that the grader gives; the rewards for form come after them."""


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
        """The state after `step`. saved: `state` of the step's checkpoint. A checkpoint of an older version
        may lack fields; a fresh run has none."""
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
        """Moves on after a step with these metrics; returns what the step itself had, as metrics. prompts:
        number that was sampled. completions: number that was trained on."""
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
    """Penalty of long completions, [N] (DAPO, arXiv 2503.14476, eq. 13). It is 0 up to (1 - buffer)
    max_tokens, and falls linearly to -1 at max_tokens."""
    start = max_tokens * (1 - buffer)
    return -((lengths.double() - start) / (max_tokens * buffer)).clamp(0, 1)


def add_form_rewards(by_grader: RewardParts, lengths: Tensor, config: RunConfig) -> RewardParts:
    """The grader's rewards, followed by the penalty of long completions where it is set. lengths: [N]."""
    algorithm = config.algorithm
    if not (algorithm.overlong_buffer and algorithm.overlong_penalty):
        return by_grader
    values = overlong_penalty(lengths, config.rollout.max_tokens, algorithm.overlong_buffer)
    return RewardParts(
        (*by_grader.names, "reward/overlong"),
        torch.cat([by_grader.parts, values[:, None]], 1),
        torch.cat([by_grader.weights, by_grader.weights.new_tensor([algorithm.overlong_penalty])]),
    )


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient after a step of `samples` completions whose KL was `kl` (Ziegler et al., arXiv
    1909.08593). A KL that is not finite, because updates were skipped, leaves the coefficient as it is."""
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
