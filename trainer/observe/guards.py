"""Guards against a run that continues and learns nothing: pure functions of each step's metrics.

A guard that trips warns; one that is named in `guards.end` ends the run when it has tripped `guards.patience`
steps in a row.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import Guards as Limits

WINDOW = 20
"""Steps whose median is usual."""
REFERENCE = 10
"""First steps of a run (or of a resumed one), which entropy and mismatch are held against."""


@dataclass(frozen=True)
class Alarm:
    guard: str
    text: str
    end: bool
    """The run is to end."""


class Guards:
    """Holds what earlier steps were like."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._ends = [name.strip() for name in limits.end.split(",")]
        self._usual: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._streak: dict[str, int] = {}

    def look(self, step: int, stats: Mapping[str, float]) -> list[Alarm]:
        """The alarms of a step, in the order of the guards."""
        found = []
        for guard, text in self._trips(stats).items():
            self._streak[guard] = self._streak.get(guard, 0) + 1 if text else 0
            if text:
                streak = self._streak[guard]
                end = guard in self._ends and streak >= self.limits.patience
                if end or streak & (streak - 1) == 0:  # a lasting one at 1, 2, 4, 8, ... in a row
                    found.append(Alarm(guard, f"step {step}: {text} (guard {guard}, {streak} in a row)", end))
        return found

    def _trips(self, stats: Mapping[str, float]) -> dict[str, str]:
        limits = self.limits
        return {
            "nonfinite": self._nonfinite(stats),
            "spike": self._spike(stats),
            "skipped": self._above(stats, "optim/skipped_updates", 0.0, "updates were skipped, gradients not finite:"),
            "kl": self._above(stats, "kl/mean", limits.kl_max, "the policy has left the reference: KL"),
            "truncated": self._above(
                stats, "tokens/truncated_fraction", limits.truncated_max, "responses cut at rollout.max_tokens: share"
            ),
            "variance": self._above(
                stats, "group/zero_std_fraction", limits.zero_std_max, "groups without variance teach nothing: share"
            ),
            "entropy": self._shrunk(stats),
            "mismatch": self._grown(stats),
            "disk": self._below(stats, "perf/disk_free_gib", limits.disk_free_gib, "the disk fills up: GiB free"),
            "memory": self._above(
                stats, "perf/host_memory_fraction", limits.host_memory_max, "host memory fills up: share used"
            )
            or self._leaking(stats),
        }  # fmt: skip

    @staticmethod
    def _nonfinite(stats: Mapping[str, float]) -> str:
        names = ("loss/total", "sft/loss", "grad/norm", "kl/mean", "entropy/mean")
        bad = [n for n in names if n in stats and not math.isfinite(stats[n])]
        text = "not finite: look at the data of this step, or start a new run with a lower learning rate"
        return f"{', '.join(bad)} {text}" if bad else ""

    def _spike(self, stats: Mapping[str, float]) -> str:
        """Of the gradient's norm, and of the cross-entropy; a policy's loss is near 0 and means nothing by
        its size."""
        found = []
        for name, what, factor in (
            ("grad/norm", "gradient norm", self.limits.spike_factor),
            ("sft/loss", "loss", self.limits.loss_factor),
        ):
            now, known = stats.get(name, math.nan), self._usual.setdefault(name, deque(maxlen=WINDOW))
            if not math.isfinite(now):
                continue
            usual = statistics.median(known) if len(known) >= REFERENCE else math.inf
            known.append(now)
            if now > factor * usual:
                found.append(f"{what} {now:.3g}, usually {usual:.3g}")
        return "; ".join(found)

    @staticmethod
    def _above(stats: Mapping[str, float], name: str, limit: float, text: str) -> str:
        return f"{text} {stats[name]:.3g} (limit {limit:.3g})" if stats.get(name, -math.inf) > limit else ""

    @staticmethod
    def _below(stats: Mapping[str, float], name: str, limit: float, text: str) -> str:
        return f"{text} {stats[name]:.3g} (limit {limit:.3g})" if stats.get(name, math.inf) < limit else ""

    def _reference(self, stats: Mapping[str, float], name: str) -> float | None:
        """Median of the first steps; None until there are enough of them."""
        if name not in stats or not math.isfinite(stats[name]):
            return None
        first = self._first.setdefault(name, [])
        if len(first) < REFERENCE:
            first.append(stats[name])
            return None
        return statistics.median(first)

    def _leaking(self, stats: Mapping[str, float]) -> str:
        name = "perf/host_memory_fraction"
        usual, now = self._reference(stats, name), stats.get(name, 0.0)
        if usual is None or now - usual <= self.limits.host_memory_growth:
            return ""
        return f"host memory grows: {now:.0%} in use, {usual:.0%} at the start"

    def _shrunk(self, stats: Mapping[str, float]) -> str:
        usual, now = self._reference(stats, "entropy/mean"), stats.get("entropy/mean", 0.0)
        if usual is None or now >= self.limits.entropy_min_share * usual:
            return ""
        return f"entropy collapsed to {now:.3g} from {usual:.3g} at the start: the policy says one thing only"

    def _grown(self, stats: Mapping[str, float]) -> str:
        name = "mismatch/logprob_abs_mean"
        usual, now = self._reference(stats, name), stats.get(name, 0.0)
        if usual is None or now <= self.limits.mismatch_factor * max(usual, 1e-4):
            return ""
        return f"engine and policy drift apart: {now:.2g} nats per token, {usual:.2g} at the start"
