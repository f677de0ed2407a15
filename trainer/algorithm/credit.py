"""From a step's graded completions to the items that are trained on and their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithm.advantages import Advantages, Rewards, estimate, flat_groups
from trainer.algorithm.batching import TrainItem
from trainer.algorithm.losses import kl_divergence
from trainer.algorithm.records import Outcome, Sample
from trainer.algorithm.refill import chosen
from trainer.algorithm.shaping import graded, shaped
from trainer.config import RunConfig


@dataclass(frozen=True)
class Batch:
    """What a step trains on."""

    samples: list[Sample]
    outcomes: list[Outcome]
    advantages: Advantages


@dataclass(frozen=True)
class Credit:
    """Rewards of all of a step's completions, and which groups tell better from worse."""

    rewards: Rewards
    groups: Tensor
    """[N]"""
    flat: list[bool]
    """Of every group, by its number: whether the grader gave all of it the same."""
    finished: list[bool]

    def members(self, size: int) -> list[int]:
        """Indices of the completions that are trained on: those of `size` groups."""
        kept = set(chosen(self.flat, size))
        return [i for i, group in enumerate(self.groups.tolist()) if group in kept]

    def advantages(
        self, config: RunConfig, total: Tensor, members: list[int], items: Sequence[TrainItem], kl_coef: float
    ) -> tuple[Advantages, list[TrainItem]]:
        """Of `members`, which `items` are in the same order; and the items with them.

        total: rewards of all completions, [N], normalized if so configured. kl_coef: of the KL in the reward.
        """
        at, algorithm = torch.tensor(members), config.algorithm
        rewards = replace(self.rewards, parts=self.rewards.parts[at])
        lengths = torch.tensor([len(item.token_ids) for item in items])
        kl = kl_coef * token_kl(config, items) if config.kl_in_reward else None
        found = estimate(algorithm, rewards, total[at], self.groups[at], lengths, kl)
        tokens = found.tokens or [None] * len(items)
        values = zip(items, found.values.tolist(), tokens, strict=True)
        return found, [replace(item, advantage=a, token_advantages=t) for item, a, t in values]

    def describe(self, config: RunConfig, members: list[int]) -> dict[str, float]:
        """Rewards that are none of the grader's, groups, and what the update left out."""
        groups, size = len(self.flat), config.rollout.prompts_per_step
        out = {"group/zero_std_fraction": sum(self.flat) / groups}
        for name, values in list(zip(self.rewards.names, self.rewards.parts.T, strict=True))[2:]:
            out[name] = float(values.mean())
        if config.algorithm.refill_rounds:
            kept = chosen(self.flat, size)
            out |= {"group/sampled": groups, "group/trained_zero_std": sum(self.flat[g] for g in kept)}
            out["group/surplus"] = groups - sum(self.flat) - (len(kept) - out["group/trained_zero_std"])
        if config.algorithm.mask_truncated:
            out["tokens/masked_fraction"] = sum(not self.finished[i] for i in members) / len(members)
        return out


def credited(config: RunConfig, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> Credit:
    """Rewards of a step's completions."""
    found, groups = graded(outcomes, config), torch.tensor([s.group for s in samples])
    rewards = shaped(found, samples, groups, config)
    return Credit(rewards, groups, flat_groups(found.total, groups).tolist(), [s.finished for s in samples])


def token_kl(config: RunConfig, items: Sequence[TrainItem]) -> Tensor:
    """Estimates of the KL to the reference at every completion token, [sum of lengths]."""
    policy, reference = (
        torch.tensor([x for item in items for x in getattr(item, name) or ()], dtype=torch.float64)
        for name in ("old_logprobs", "ref_logprobs")
    )
    return kl_divergence(policy, reference, config.algorithm.kl_estimator)
