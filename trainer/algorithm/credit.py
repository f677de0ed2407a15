"""Selects the completions of a step that are trained on, and computes their advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.algorithm.advantages import Advantages, RewardParts, estimate_advantages, flat_groups
from trainer.algorithm.losses import discount_advantages, kl_divergence
from trainer.algorithm.reward_shaping import GRADED, add_form_rewards, weighted_rewards
from trainer.algorithm.traces import Outcome, Trace
from trainer.config import RunConfig


@dataclass(frozen=True)
class CreditedTraces:
    """The traces that a step trains on, with the grader's outcome and the advantages of each."""

    traces: list[Trace]
    outcomes: list[Outcome]
    advantages: Advantages


@dataclass(frozen=True)
class StepRewards:
    """Rewards of all of a step's completions, and which groups have unequal rewards."""

    rewards: RewardParts
    groups: Tensor
    """Number of the group of each completion, [N]."""
    lengths: Tensor
    """Learned tokens of each completion, [N]."""
    flat: list[bool]
    """Whether the grader gave a whole group the same reward, for each group by its number."""
    finished: list[bool]
    """Whether each completion ended by itself, [N]."""

    def members(self, size: int) -> list[int]:
        """Indices of the completions that are trained on: those of the `size` chosen groups."""
        kept = set(choose_groups(self.flat, size))
        return [i for i, group in enumerate(self.groups.tolist()) if group in kept]

    def advantages(
        self, config: RunConfig, total: Tensor, members: list[int], kl: Tensor | None
    ) -> Advantages:
        """Advantages of `members`, in their order. total: rewards of all completions, [N], normalized if so
        configured. kl: KL cost of each learned token of the members, [sum of lengths]; None if the rewards
        contain no KL."""
        at = torch.tensor(members)
        rewards = replace(self.rewards, parts=self.rewards.parts[at])
        return estimate_advantages(
            config.algorithm, rewards, total[at], self.groups[at], self.lengths[at], kl
        )

    def describe(self, config: RunConfig, members: list[int]) -> dict[str, float]:
        """Metrics of the groups, of the rewards for form, and of the completions that the update left out."""
        groups = len(self.flat)
        flat_groups = sum(self.flat)
        out = {"group/zero_std_fraction": flat_groups / groups}
        columns = self.rewards.parts.T
        for name, values in zip(self.rewards.names, columns, strict=True):
            if name not in GRADED:
                out[name] = float(values.mean())

        if config.algorithm.refill_rounds:
            kept = choose_groups(self.flat, config.rollout.prompts_per_step)
            trained_flat = sum(self.flat[group] for group in kept)
            trained_useful = len(kept) - trained_flat
            out["group/sampled"] = groups
            out["group/trained_zero_std"] = trained_flat
            out["group/surplus"] = groups - flat_groups - trained_useful
        if config.algorithm.mask_truncated:
            truncated = sum(not self.finished[i] for i in members)
            out["tokens/masked_fraction"] = truncated / len(members)
        return out


def reward_step(config: RunConfig, traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> StepRewards:
    """Rewards of a step's completions."""
    groups = torch.tensor([trace.group for trace in traces])
    lengths = torch.tensor([len(trace.learned) for trace in traces])
    given = weighted_rewards(outcomes, config)
    # If the grader's rewards have no weight, its verdicts still tell which groups are flat.
    compared = given.total if given.weights.any() else given.parts.sum(1)
    return StepRewards(
        rewards=add_form_rewards(given, lengths, config),
        groups=groups,
        lengths=lengths,
        flat=flat_groups(compared, groups).tolist(),
        finished=[trace.finished for trace in traces],
    )


def learnable_indices(traces: Sequence[Trace], mask_truncated: bool) -> list[int]:
    """Indices of the traces that count in the loss. A token of theirs must be learned, the engine's
    log-probabilities must be finite, and with `mask_truncated` the model must have ended the trace by
    itself."""
    counts = [len(t.learned) and t.sound and not (mask_truncated and not t.finished) for t in traces]
    return [i for i, counted in enumerate(counts) if counted]


def token_kl(config: RunConfig, old: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> Tensor:
    """Estimates of the KL to the reference at every learned token, [sum of lengths]. old, reference:
    log-probabilities under policy and reference, [T] per trace."""
    policy_flat = torch.from_numpy(np.concatenate(old)).double()
    reference_flat = torch.from_numpy(np.concatenate(reference)).double()
    return kl_divergence(policy_flat, reference_flat, config.algorithm.kl_estimated_by)


def by_token(advantages: Advantages, lengths: Tensor, gamma: float) -> list[np.ndarray]:
    """Advantage of every learned token, [T] float32 per trace; lengths: [N], learned tokens of each."""
    if advantages.tokens is not None:
        return [np.asarray(values, np.float32) for values in advantages.tokens]
    flat = discount_advantages(advantages.values, lengths, gamma)
    return [part.numpy() for part in flat.split(lengths.tolist())]


def prompts_to_refill(flat: Sequence[bool], size: int) -> int:
    """Number of prompts of the next round, `size` at most; 0 if there are enough groups of unequal rewards.
    `flat` says of every group so far whether its rewards are equal. The next round should give the missing
    groups at the share of unequal ones so far."""
    useful = len(flat) - sum(flat)
    missing = max(size - useful, 0)
    if not useful:
        return missing
    return min(size, math.ceil(missing * len(flat) / useful))


def choose_groups(flat: Sequence[bool], size: int) -> list[int]:
    """The `size` groups that are trained on, in the order in which they were sampled. Groups of unequal
    rewards are taken first; groups of equal rewards fill what is missing."""
    order = sorted(range(len(flat)), key=lambda group: (flat[group], group))
    return sorted(order[:size])


def add_teacher_advantages(
    advantages: Sequence[np.ndarray],
    teacher: Sequence[np.ndarray],
    old: Sequence[np.ndarray],
    coef: float,
) -> list[np.ndarray]:
    """Advantage of every token with coef * (log p_teacher - log p_old) added, [T] float32 per trace. teacher,
    old: log-probabilities under teacher and policy, [T] per trace. The term is minus a one-sample estimate of
    the reverse KL at that token. Later tokens do not count toward it: no returns are summed up."""
    out = []
    for own, theirs, before in zip(advantages, teacher, old, strict=True):
        gap = theirs.astype(np.float64) - before.astype(np.float64)
        out.append((own + coef * gap).astype(np.float32))
    return out


def teacher_metrics(teacher: Sequence[np.ndarray], old: Sequence[np.ndarray]) -> dict[str, float]:
    """`teacher/*` of a step's trained tokens: how far the policy is from its teacher. Empty where there are
    none."""
    if not teacher:
        return {}
    gap = np.concatenate(old).astype(np.float64) - np.concatenate(teacher)
    return {
        "teacher/kl": float(gap.mean()),
        "teacher/gap_max": float(np.abs(gap).max()),
        "teacher/likelier_fraction": float((gap < 0).mean()),
    }
