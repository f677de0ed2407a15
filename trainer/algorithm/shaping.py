"""What is made of the graded rewards before the advantages, and what of it the run carries from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.advantages import Rewards, RunningNorm
from trainer.algorithm.records import Outcome
from trainer.config import Algorithm, RunConfig


@dataclass
class Carried(RunningNorm):
    """What a step leaves to the next besides the weights: running statistics of the rewards, and these."""

    kl_coef: float = 0.0
    """Of the next step."""
    prompts: int = 0
    """Asked so far."""

    def start(self, config: RunConfig, step: int) -> None:
        """After a resume from `step`, or at 0: fills what a fresh run, or the checkpoint of an older one, has not."""
        self.kl_coef = self.kl_coef or config.algorithm.kl_coef
        self.prompts = self.prompts or step * config.rollout.prompts_per_step


def graded(outcomes: Sequence[Outcome], config: RunConfig) -> Rewards:
    """What the grader gave, by name, with the weights."""
    return Rewards(
        ("accuracy", "format"),
        torch.tensor([[o.accuracy, o.format] for o in outcomes], dtype=torch.float64).reshape(-1, 2),
        torch.tensor([config.rewards.accuracy_weight, config.rewards.format_weight], dtype=torch.float64),
    )


def overlong(lengths: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """0 up to (1 - buffer) max_tokens, then linear to -1 at max_tokens; [N] (DAPO, arXiv 2503.14476, eq. 13)."""
    start = max_tokens * (1 - buffer)
    return -((lengths.double() - start) / (max_tokens * buffer)).clamp(0, 1)


def with_overlong(rewards: Rewards, lengths: Tensor, algorithm: Algorithm, max_tokens: int) -> Rewards:
    """The rewards with the soft punishment as one more of them, where it is on."""
    if not algorithm.overlong_buffer:
        return rewards
    penalty = overlong(lengths, max_tokens, algorithm.overlong_buffer)
    return Rewards(
        (*rewards.names, "overlong"),
        torch.cat([rewards.parts, penalty[:, None]], 1),
        torch.cat([rewards.weights, rewards.weights.new_tensor([algorithm.overlong_penalty])]),
    )


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient after a step of `samples` completions whose KL was `kl` (Ziegler et al., arXiv 1909.08593)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
