"""On-policy distillation: the term that a teacher's log-probabilities add to the advantages of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def add_teacher_advantages(
    advantages: Sequence[np.ndarray],
    teacher: Sequence[np.ndarray],
    old: Sequence[np.ndarray],
    coef: float,
) -> list[np.ndarray]:
    """Advantage of every token with coef * (log p_teacher - log p_old) added, [T] float32 per trace.

    teacher, old: log-probabilities under teacher and policy, [T] per trace. The term is minus a one-sample
    estimate of the reverse KL at that token. Later tokens do not count toward it: no returns are summed up.
    """
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
