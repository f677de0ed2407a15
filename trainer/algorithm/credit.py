"""Turns a step's graded completions into the items that are trained on, with their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithm.advantages import Advantages, RewardParts, estimate, flat_groups
from trainer.algorithm.batching import TrainItem
from trainer.algorithm.losses import kl_divergence
from trainer.algorithm.records import Outcome, Sample
from trainer.algorithm.refill import chosen
from trainer.algorithm.shaping import GRADED, graded, shaped
from trainer.config import RunConfig


@dataclass(frozen=True)
class Batch:
    """The completions that a step trains on."""

    samples: list[Sample]
    outcomes: list[Outcome]
    advantages: Advantages


@dataclass(frozen=True)
class Credit:
    """Rewards of all of a step's completions, and which groups have unequal rewards."""

    rewards: RewardParts
    groups: Tensor
    """[N] number of the group of each completion."""
    flat: list[bool]
    """Whether the grader gave a whole group the same reward, for each group by its number."""
    finished: list[bool]
    """Whether each completion ended by itself, [N]."""

    def members(self, size: int) -> list[int]:
        """Indices of the completions that are trained on, which are those of `size` groups."""
        kept = set(chosen(self.flat, size))
        return [i for i, group in enumerate(self.groups.tolist()) if group in kept]

    def advantages(
        self, config: RunConfig, total: Tensor, members: list[int], items: Sequence[TrainItem], kl_coef: float
    ) -> tuple[Advantages, list[TrainItem]]:
        """Advantages of the completions `members`, and `items` (one for each member) that carry them.

        `total` [N] holds the rewards of all completions, normalized if the run is configured so.
        `kl_coef` is the coefficient of the KL in the reward.
        """
        at = torch.tensor(members)
        rewards = replace(self.rewards, parts=self.rewards.parts[at])
        lengths = torch.tensor([len(item.token_ids) for item in items])
        kl = kl_coef * token_kl(config, items) if config.kl_in_reward else None
        estimated = estimate(config.algorithm, rewards, total[at], self.groups[at], lengths, kl)

        by_token = estimated.tokens or [None] * len(items)
        with_advantages = []
        for item, value, tokens in zip(items, estimated.values.tolist(), by_token, strict=True):
            with_advantages.append(replace(item, advantage=value, token_advantages=tokens))
        return estimated, with_advantages

    def describe(self, config: RunConfig, members: list[int]) -> dict[str, float]:
        """Metrics of the groups, of the rewards of the form, and of what the update left out."""
        groups = len(self.flat)
        out = {"group/zero_std_fraction": sum(self.flat) / groups}
        by_name = zip(self.rewards.names, self.rewards.parts.T, strict=True)
        for name, values in list(by_name)[len(GRADED) :]:
            out[name] = float(values.mean())

        if config.algorithm.refill_rounds:
            kept = chosen(self.flat, config.rollout.prompts_per_step)
            trained_flat = sum(self.flat[group] for group in kept)
            useful = groups - sum(self.flat)
            out["group/sampled"] = groups
            out["group/trained_zero_std"] = trained_flat
            out["group/surplus"] = useful - (len(kept) - trained_flat)
        if config.algorithm.mask_truncated:
            out["tokens/masked_fraction"] = sum(not self.finished[i] for i in members) / len(members)
        return out


def credited(config: RunConfig, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> Credit:
    """Rewards and groups of a step's completions."""
    by_grader = graded(outcomes, config)
    groups = torch.tensor([s.group for s in samples])
    return Credit(
        rewards=shaped(by_grader, samples, groups, config),
        groups=groups,
        flat=flat_groups(by_grader.total, groups).tolist(),
        finished=[s.finished for s in samples],
    )


def token_kl(config: RunConfig, items: Sequence[TrainItem]) -> Tensor:
    """Estimates of the KL to the reference at every completion token, [sum of lengths]."""
    policy = [x for item in items for x in item.old_logprobs or ()]
    reference = [x for item in items for x in item.ref_logprobs or ()]
    return kl_divergence(
        torch.tensor(policy, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
        config.algorithm.kl_estimator,
    )
