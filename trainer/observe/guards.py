"""Guards against a run that continues but learns nothing: pure functions of each step's metrics.

A guard that trips warns. One that is named in `guards.end` ends the run when it has tripped `guards.patience`
steps in a row.

`python -m trainer.observe.guards FOLDER` prints those of a run's files, as JSON: [[guard, text], ...].
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer import config
from trainer.config.run_folder import CONFIG, METRICS, read_lines

WINDOW = 20
"""Number of the last steps whose median counts as usual."""
REFERENCE = 10
"""Number of first steps, since the start or a resume, with which entropy and mismatch are compared."""

NO_ANSWER = "reward/no_answer_rate"
SHOWN = ("no_answer", "variance")
"""Guards whose alarm shows a completion."""
SHOWN_CHARS = 200
NEARLY_ALL = 0.9
"""Share of completions that are right, or wrong, where no group teaches anything."""


@dataclass(frozen=True)
class Alarm:
    guard: str
    text: str
    end: bool
    """Whether the run must end."""


class GuardWatch:
    """Compares each step with limits and with earlier steps."""

    def __init__(self, limits: config.Guards, form: str = "") -> None:
        """form: what an answer has to look like, for a person."""
        self.limits = limits
        self._form = form
        self._ends = [name.strip() for name in limits.end.split(",")]
        self._usual: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._streak: dict[str, int] = {}

    def look(self, step: int, stats: Mapping[str, float], example: str = "") -> list[Alarm]:
        """The alarms of a step, in the order of the guards. example: one of its completions."""
        alarms = []
        for guard, text in self._trips(stats).items():
            if text and example and guard in SHOWN:
                text += f". One of them: {_short(example)!r}"
            if not text:
                self._streak[guard] = 0
                continue
            streak = self._streak.get(guard, 0) + 1
            self._streak[guard] = streak
            end = guard in self._ends and streak >= self.limits.patience
            # A lasting alarm is repeated after 1, 2, 4, 8, ... steps.
            if end or streak & (streak - 1) == 0:
                alarms.append(Alarm(guard, f"step {step}: {text} (guard {guard}, {streak} in a row)", end))
        return alarms

    def _trips(self, stats: Mapping[str, float]) -> dict[str, str]:
        """Guard -> what is wrong; empty if nothing is."""
        limits = self.limits
        skipped = "updates were skipped, gradients not finite:"
        left = "the policy has left the reference: KL"
        cut = "responses cut at rollout.max_tokens: share"
        flat = "groups without variance teach nothing: share"
        formless = "no answer was found where one is expected"
        if self._form:
            formless += f" ({self._form}; rewards.answer, data.system_prompt)"
        disk = "the disk fills up: GiB free"
        memory = "host memory fills up: share used"
        host_memory = self._above(stats, "perf/host_memory_fraction", limits.host_memory_max, memory)
        return {
            "nonfinite": self._nonfinite(stats),
            "spike": self._spike(stats),
            "skipped": self._above(stats, "optim/skipped_updates", 0.0, skipped),
            "kl": self._above(stats, "kl/mean", limits.kl_max, left),
            "truncated": self._above(stats, "tokens/truncated_fraction", limits.truncated_max, cut),
            "no_answer": self._above(stats, NO_ANSWER, limits.no_answer_max, f"{formless}: share"),
            "variance": self._above(
                stats, "group/zero_std_fraction", limits.zero_std_max, flat, self._why_flat(stats)
            ),
            "entropy": self._shrunk(stats),
            "mismatch": self._grown(stats),
            "disk": self._below(stats, "perf/disk_free_gib", limits.disk_free_gib, disk),
            "memory": host_memory or self._leaking(stats),
        }

    def _why_flat(self, stats: Mapping[str, float]) -> str:
        """What most completions of equal rewards have in common."""
        if stats.get(NO_ANSWER, 0.0) > self.limits.no_answer_max:
            return "no answer was found in them"
        if stats.get("tokens/truncated_fraction", 0.0) > self.limits.truncated_max:
            return "most were cut at rollout.max_tokens"
        right = stats.get("reward/accuracy", 0.5)
        if right > 0.9:
            return "nearly all are right: harder rows would"
        return (
            "nearly all are wrong: easier rows would" if right < 0.1 else "each is right or wrong as a whole"
        )

    @staticmethod
    def _nonfinite(stats: Mapping[str, float]) -> str:
        names = ("loss/total", "sft/loss", "grad/norm", "kl/mean", "entropy/mean")
        bad = [n for n in names if n in stats and not math.isfinite(stats[n])]
        text = "not finite: look at the data of this step, or start a new run with a lower learning rate"
        return f"{', '.join(bad)} {text}" if bad else ""

    def _spike(self, stats: Mapping[str, float]) -> str:
        """What is wrong with the gradient's norm or the cross-entropy.

        A policy's loss is near 0, so its size means nothing.
        """
        spikes = []
        for name, what, factor in (
            ("grad/norm", "gradient norm", self.limits.spike_factor),
            ("sft/loss", "loss", self.limits.loss_factor),
        ):
            now = stats.get(name, math.nan)
            known = self._usual.setdefault(name, deque(maxlen=WINDOW))
            if not math.isfinite(now):
                continue
            usual = statistics.median(known) if len(known) >= REFERENCE else math.inf
            known.append(now)
            if now > factor * usual:
                spikes.append(f"{what} {now:.3g}, usually {usual:.3g}")
        return "; ".join(spikes)

    @staticmethod
    def _above(stats: Mapping[str, float], name: str, limit: float, text: str, why: str = "") -> str:
        now = stats.get(name, -math.inf)
        return f"{text} {now:.3g} (limit {limit:.3g}){why}" if now > limit else ""

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
        usual = self._reference(stats, name)
        now = stats.get(name, 0.0)
        if usual is None or now - usual <= self.limits.host_memory_growth:
            return ""
        return f"host memory grows: {now:.0%} in use, {usual:.0%} at the start"

    def _shrunk(self, stats: Mapping[str, float]) -> str:
        usual = self._reference(stats, "entropy/mean")
        now = stats.get("entropy/mean", 0.0)
        if usual is None or now >= self.limits.entropy_min_share * usual:
            return ""
        return f"entropy collapsed to {now:.3g} from {usual:.3g} at the start: the policy says one thing only"

    def _grown(self, stats: Mapping[str, float]) -> str:
        name = "mismatch/logprob_abs_mean"
        usual = self._reference(stats, name)
        now = stats.get(name, 0.0)
        if usual is None or now <= self.limits.mismatch_factor * max(usual, 1e-4):
            return ""
        return f"engine and policy drift apart: {now:.2g} nats per token, {usual:.2g} at the start"


def _short(text: str) -> str:
    """A completion for a line of the log: its end is where the answer is expected."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else f"... {text[-SHOWN_CHARS:]}"


def of_folder(folder: Path) -> list[Alarm]:
    """The alarms of a run's files, by the run's own limits."""
    watch = GuardWatch(config.load(str(folder / CONFIG)).guards)
    alarms = []
    for line in read_lines(folder / METRICS):
        if "step" in line:
            numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
            alarms += watch.look(line["step"], numbers)
    return alarms


if __name__ == "__main__":
    print(json.dumps([(alarm.guard, alarm.text) for alarm in of_folder(Path(sys.argv[1]))]))
