"""Guards against a run that continues but learns nothing: pure functions of each step's metrics.

A guard that trips warns. One that is named in `guards.end` ends the run when it has tripped `guards.patience`
steps in a row.

`python -m trainer.observe.guards FOLDER` prints those that a run tripped, as JSON: [[guard, text], ...].
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer import config
from trainer.config.expected import ExpectationWatch
from trainer.config.run_folder import CONFIG
from trainer.config.watching import GUARDS
from trainer.observe.history import read_history

WINDOW = 20
"""Number of the last steps whose median counts as usual."""
REFERENCE = 10
"""Number of the run's first steps with which entropy, length and mismatch are compared."""
FEWEST = 2
"""Fewest of these steps with which a step is compared. A step that trips its guard is not one of them."""
OWN_TO_PROCESS = ("perf/", "time/")
"""Metrics of the machine. A resumed run may be on another one, so earlier values are not compared."""

NO_ANSWER = "reward/no_answer_rate"
SHOWN = ("no_answer", "variance")
"""Guards whose alarm shows a completion."""
OF_MACHINES = ("disk", "memory")
"""Guards whose alarm is about the machine, not about the weights."""
QUIET = 10
"""Steps without a guard's alarm after which it no longer lasts."""
SHOWN_CHARS = 200
LIMITS = {
    "reward": ("reward/largest", "reward_max", "a reward is very large, which drowns all others:"),
    "skipped": ("optim/skipped_updates", "", "updates were skipped, gradients not finite:"),
    "kl": ("kl/mean", "kl_max", "the policy has left the reference: KL"),
    "truncated": ("tokens/truncated_fraction", "truncated_max", "responses cut at rollout.max_tokens: share"),
    "no_answer": (NO_ANSWER, "no_answer_max", "no answer was found where one is expected{form}: share"),
    "variance": ("group/zero_std_fraction", "zero_std_max", "groups without variance teach nothing: share"),
    "disk": ("perf/disk_free_gib", "disk_free_gib", "the disk fills up: GiB free"),
    "memory": ("perf/host_memory_fraction", "host_memory_max", "host memory fills up: share used"),
    "tools": ("turns/failed_fraction", "tool_failures_max",
              "tools fail instead of answering: share of observations"),
}  # fmt: skip
"""Guard -> its metric, the option that limits it ("": 0), and what is wrong beyond that."""
DRIFTS = {
    "entropy": ("entropy/mean",
        "entropy collapsed to {now:.3g} from {usual:.3g} at the start: the policy says one thing only",
        "entropy grew to {now:.3g} from {usual:.3g} at the start: the policy speaks at random"),
    "length": ("tokens/response_mean",
        "completions shrank to {now:.3g} from {usual:.3g} at the start: the policy hardly says anything",
        "completions grew to {now:.3g} from {usual:.3g} at the start: the policy does not come to an end"),
    "mismatch": ("mismatch/logprob_abs_mean", "",
        "engine and policy drift apart: {now:.2g} nats per token, {usual:.2g} at the start"),
    "memory": ("perf/host_memory_fraction", "",
        "host memory grows: {now:.0%} in use, {usual:.0%} at the start"),
}  # fmt: skip
"""Guard -> a metric that is compared with the run's first steps, and what is wrong below and above."""
FAILED_GRADES = 0.05
"""Share of completions that graders failed on from which equal rewards are blamed on the graders."""


REMEDIES = {
    "nonfinite": "Look at the rows of this step, or start a new run with a lower optimizer.learning_rate.",
    "reward": "Bound what the reward function returns.",
    "engine": "The engine must hold the policy's weights: send its maintainers the run's `launch.log`.",
    "spike": "Lower optimizer.learning_rate or optimizer.max_grad_norm if it comes again.",
    "gradient": "Lower optimizer.learning_rate or optimizer.max_grad_norm; at 0, look at the loss.",
    "skipped": "Lower optimizer.learning_rate.",
    "kl": "Lower optimizer.learning_rate, or raise algorithm.kl_coef.",
    "truncated": "Raise rollout.max_tokens, or ask for shorter answers in data.system_prompt.",
    "no_answer": "Say in data.system_prompt how to give the answer (rewards.answer), and leave room for it.",
    "variance": "Take rows that the model solves sometimes, or a reward with more values.",
    "entropy": "Lower optimizer.learning_rate; python3 launch.py resume RUN --before STEP goes back.",
    "length": "Look at the samples, and at what the reward pays for.",
    "mismatch": "Lower rollout.staleness, and look at mismatch/logprob_abs_mean.",
    "disk": "Free the disk, or keep fewer checkpoints (checkpoint.keep_last).",
    "memory": "Lower data.image_cache_gib, or take machines with more memory.",
    "expected": "See where it left its bands: python3 launch.py compare RUN --expected.",
    "tools": "Correct the tool that fails.",
}
"""Guard -> what to change, for the report."""


@dataclass(frozen=True)
class Alarm:
    guard: str
    finding: str
    """What is wrong, in words."""
    end: bool
    """Whether the run must end."""
    step: int
    streak: int
    """Steps in a row that have tripped the guard, this one included."""

    @property
    def text(self) -> str:
        return f"step {self.step}: {self.finding} (guard {self.guard}, {self.streak} in a row)"


class GuardWatch:
    """Compares each step with limits and with earlier steps."""

    def __init__(self, settings: config.RunConfig, form: str = "") -> None:
        """form: what an answer has to look like, for a person."""
        self.limits = settings.guards
        self._expected = ExpectationWatch(settings.expected)
        self._form = form
        self._engine_tolerance = settings.engine_tolerance
        functions = " + ".join(function.path for function in settings.rewards.own)
        self._scored_by = f"rewards.function {functions}" if functions else ""
        self._ends = settings.guards.ending
        self._usual: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._streak: dict[str, int] = {}
        self._alarms: dict[str, tuple[int, int]] = {}
        """First and last step of the lasting alarm of each guard that tells of the weights."""

    def remember(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the steps that the run made before this process: what is usual lives with the run."""
        for record in history:
            known = {name: value for name, value in record.items() if not name.startswith(OWN_TO_PROCESS)}
            self.look(record["step"], known)

    def look(
        self,
        step: int,
        stats: Mapping[str, float],
        example: str = "",
        causes: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Alarm]:
        """The alarms of a step, in the order of the guards. example: one of its completions. causes: guard ->
        what it would name, such as the row of a reward."""
        alarms = []
        for guard, text in self._trips(step, stats).items():
            if text and example and guard in SHOWN:
                text += f". One of them: {shortened_completion(example)!r}"
            if text and causes.get(guard):
                text += f": {causes[guard]}"
            if not text:
                self._streak[guard] = 0
                continue
            if guard not in OF_MACHINES:
                self._alarms[guard] = self._alarms.get(guard, (step, step))[0], step
            streak = self._streak.get(guard, 0) + 1
            self._streak[guard] = streak
            end = guard in self._ends and streak >= self.limits.patience
            # A lasting alarm is repeated after 1, 2, 4, 8, ... steps.
            if end or streak & (streak - 1) == 0:
                alarms.append(Alarm(guard, text, end, step, streak))
        self._alarms = {guard: at for guard, at in self._alarms.items() if step - at[1] < QUIET}
        return alarms

    @property
    def tripped(self) -> list[str]:
        """The guards that the newest step has tripped."""
        return [guard for guard, streak in self._streak.items() if streak]

    @property
    def trouble_since(self) -> int:
        """Step of the first alarm that lasts; 0: there is none. One that has been there since the run's first
        steps (too many equal rewards, say) does not hide one that came later."""
        starts = sorted(first for first, _ in self._alarms.values())
        for step in starts:
            if step > REFERENCE:
                return step
        return starts[0] if starts else 0

    def _trips(self, step: int, stats: Mapping[str, float]) -> dict[str, str]:
        """Guard -> what is wrong; empty if nothing is."""
        findings = {guard: self._beyond_limit(guard, stats) for guard in GUARDS}
        findings["nonfinite"] = self._nonfinite(stats)
        findings["engine"] = self._engine(stats)
        findings["spike"] = self._spike(stats)
        findings["gradient"] = self._gradient(stats)
        findings["expected"] = self._unexpected(step, stats)
        if "teacher/kl" in stats:  # groups of equal rewards learn from the teacher
            findings["variance"] = ""
        elif findings["variance"]:
            findings["variance"] += f": {self._why_flat(stats)}"
        for guard in DRIFTS:
            findings[guard] = findings[guard] or self._drifted(guard, stats)
        return findings

    def _beyond_limit(self, guard: str, stats: Mapping[str, float]) -> str:
        """What is wrong with a guard's metric by its limit, which free disk is below and all others above."""
        metric, option, words = LIMITS.get(guard, ("", "", ""))
        limit = getattr(self.limits, option) if option else 0.0
        now = stats.get(metric, math.nan)
        if not (now < limit if guard == "disk" else now > limit):
            return ""
        form = f" ({self._form}; rewards.answer, data.system_prompt)" if self._form else ""
        return f"{words.format(form=form)} {now:.3g} (limit {limit:.3g})"

    def _unexpected(self, step: int, stats: Mapping[str, float]) -> str:
        """The first band that the run is outside of. Bands of seconds and memory are left out: they depend on
        the machine."""
        for departure in self._expected.look(step, stats):
            if not departure.band.metric.startswith(OWN_TO_PROCESS):
                return f"not what the recipe expects: {departure}"
        return ""

    def _why_flat(self, stats: Mapping[str, float]) -> str:
        """What most completions of equal rewards have in common."""
        failed = stats.get("reward/error_rate", 0.0) + stats.get("reward/timeout_rate", 0.0)
        if failed > FAILED_GRADES:
            return f"{failed:.0%} of completions could not be graded: look at the grader, not at the rows"
        if stats.get(NO_ANSWER, 0.0) > self.limits.no_answer_max:
            return "no answer was found in them"
        if self._scored_by and stats.get("reward/std") == 0.0:
            value = stats.get("reward/mean", math.nan)
            return f"all rewards of the step were {value:.3f}, given by {self._scored_by}"
        if stats.get("tokens/truncated_fraction", 0.0) > self.limits.truncated_max:
            return "most were cut at rollout.max_tokens"
        right = stats.get("reward/accuracy", 0.5)
        if self._scored_by and right in (0.0, 1.0):
            return f"{self._scored_by} gave {right:.3f} to every completion of the step"
        if right > 0.9:
            return "nearly all are right: harder rows would"
        return (
            "nearly all are wrong: easier rows would" if right < 0.1 else "each is right or wrong as a whole"
        )

    @staticmethod
    def _nonfinite(stats: Mapping[str, float]) -> str:
        names = ("loss/total", "sft/loss", "grad/norm", "kl/mean", "entropy/mean")
        bad = [name for name in names if not math.isfinite(stats.get(name, 0.0))]
        text = "not finite: look at the data of this step, or start a new run with a lower learning rate"
        return f"{', '.join(bad)} {text}" if bad else ""

    def _spike(self, stats: Mapping[str, float]) -> str:
        """What is wrong with the gradient's norm or the cross-entropy, beside the last steps. A policy's loss
        is near 0, so its size means nothing."""
        spikes = []
        for name, what, factor in (
            ("grad/norm", "gradient norm", self.limits.spike_factor),
            ("sft/loss", "loss", self.limits.loss_factor),
        ):
            now = stats.get(name, math.nan)
            known = self._usual.setdefault(name, deque(maxlen=WINDOW))
            if math.isfinite(now):
                usual = statistics.median(known) if len(known) >= REFERENCE else math.inf
                known.append(now)
                if now > factor * usual:
                    spikes.append(f"{what} {now:.3g}, usually {usual:.3g}")
        return "; ".join(spikes)

    def _gradient(self, stats: Mapping[str, float]) -> str:
        """What is wrong with the gradient's norm as it is, whatever it was before."""
        norm = stats.get("grad/norm", math.nan)
        if norm == 0.0 and stats.get("group/zero_std_fraction", 0.0) < 1.0:
            return "the gradient is exactly 0 although rewards differ: nothing is learned"
        if math.isfinite(norm) and norm > self.limits.grad_norm_max:
            return f"the gradient norm is {norm:.3g} (limit {self.limits.grad_norm_max:.3g})"
        return ""

    def _engine(self, stats: Mapping[str, float]) -> str:
        """What is wrong with the engine's log-probabilities, judged by this step alone."""
        count = stats.get("rollout/not_finite", 0.0)
        if count:
            return f"{count:.0f} completions have engine logprobs that are not finite and were left out"
        gap = stats.get("mismatch/logprob_abs_mean", 0.0)
        if gap <= self._engine_tolerance:
            return ""
        return (
            f"engine and policy differ by {gap:.2g} nats per token (limit {self._engine_tolerance:.0e}): the"
            " engine does not hold the policy's weights"
        )

    def _drifted(self, guard: str, stats: Mapping[str, float]) -> str:
        """What is wrong with a metric that has left its range around the median of the run's first steps.
        Nothing where the step lacks the metric, and until there are enough steps. A value that is wrong is
        not taken for usual, so a collapse in the first steps does not hide itself."""
        metric, below, above = DRIFTS[guard]
        now = stats.get(metric, math.nan)
        if not math.isfinite(now):
            return ""
        first = self._first.setdefault(metric, [])
        if len(first) >= FEWEST:
            usual = statistics.median(first)
            low, high = self._usual_range(guard, usual)
            if not low <= now <= high:
                return (below if now < low else above).format(now=now, usual=usual)
        if len(first) < REFERENCE:
            first.append(now)
        return ""

    def _usual_range(self, guard: str, usual: float) -> tuple[float, float]:
        limits = self.limits
        match guard:
            case "entropy":
                return limits.entropy_min_share * usual, limits.entropy_max_factor * usual
            case "length":
                return limits.length_min_share * usual, limits.length_max_factor * usual
            case "mismatch":
                return -math.inf, limits.mismatch_factor * max(usual, 1e-4)
        return -math.inf, usual + limits.host_memory_growth


def shortened_completion(text: str) -> str:
    """A completion for a line of the log: its end is where the answer is expected."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else f"... {text[-SHOWN_CHARS:]}"


def troubles_of(settings: config.RunConfig, history: Iterable[Mapping[str, Any]]) -> list[tuple[Alarm, int]]:
    """The first alarm of each guard that tripped in a run's metrics, by the run's own limits, and the last
    step that tripped it."""
    watch = GuardWatch(settings)
    first: dict[str, Alarm] = {}
    last: dict[str, int] = {}
    for record in history:
        for alarm in watch.look(record["step"], record):
            first.setdefault(alarm.guard, alarm)
        last |= dict.fromkeys(watch.tripped, record["step"])
    return [(alarm, last[guard]) for guard, alarm in first.items()]


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    troubles = troubles_of(config.load(str(run_folder / CONFIG)), read_history(run_folder))
    print(json.dumps([(alarm.guard, alarm.text) for alarm, _ in troubles]))
