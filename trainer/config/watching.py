"""When a run counts as hung, and what else ends it or is warned of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.ranges import ranged_field


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The launcher's watchdog: when a run without progress counts as hung."""

    on_hang: Literal["end", "warn", "off"] = "end"
    """end: writes all ranks' stacks, names the rank at fault, and ends the job with a code that restarts
    it."""
    factor: float = ranged_field(3.0, above=1)
    """A phase hangs when it takes this many times its median over the last 20 steps, ..."""
    floor_s: float = ranged_field(120.0, above=0)
    """... and at least this long."""
    first_s: float = ranged_field(900.0, above=0)
    """Limit of a phase that has never ended before."""
    start_s: float = ranged_field(900.0, above=0)
    """Limit of the start. Reading and writing files stops this clock, as in the phases of checkpoints and
    exports."""


GUARDS = (
    *("nonfinite", "reward", "engine", "spike", "gradient", "skipped", "kl", "truncated", "no_answer"),
    *("variance", "entropy", "length", "mismatch", "disk", "memory", "expected", "tools"),
)
"""Names of the guards (trainer/observe/guards.py)."""


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Warnings about a run that continues and learns nothing, and which of them end it."""

    end: str = "nonfinite,skipped,engine"
    """Guards that end the run, separated by commas: nonfinite, reward, engine, spike, gradient, skipped, kl,
    truncated, no_answer, variance, entropy, length, mismatch, disk, memory, expected, tools. Empty: none
    does."""
    patience: int = ranged_field(3, least=1)
    """Steps in a row before one of them does."""
    spike_factor: float = ranged_field(10.0, above=1)
    """Gradient norm, in multiples of its median."""
    grad_norm_max: float = ranged_field(1e3, above=0)
    """Gradient norm before clipping, whatever it was before. A norm of exactly 0 trips the same guard
    (gradient) where rewards differ within groups."""
    loss_factor: float = ranged_field(2.0, above=1)
    """Cross-entropy of supervised fine-tuning, in multiples of its median."""
    reward_max: float = ranged_field(1e6, above=0)
    """Size of a reward. One beyond 1e30, or not finite, ends the run at once."""
    kl_max: float = ranged_field(1.0, above=0)
    """KL to the reference, nats per token."""
    truncated_max: float = ranged_field(0.5, above=0)
    """Share of responses cut at `rollout.max_tokens`."""
    no_answer_max: float = ranged_field(0.9, above=0)
    """Share of responses without an answer where `rewards.answer` expects it."""
    tool_failures_max: float = ranged_field(0.2, above=0)
    """Share of observations whose tool hung, crashed, or gave what cannot be shown (`turns`)."""
    zero_std_max: float = ranged_field(0.9, above=0)
    """Share of groups whose responses all earned the same."""
    entropy_min_share: float = ranged_field(0.1, least=0)
    """Entropy as a share of what it was in the run's first ten steps."""
    entropy_max_factor: float = ranged_field(5.0, above=1)
    """Entropy in multiples of the same."""
    length_min_share: float = ranged_field(0.1, least=0)
    """Mean length of completions as a share of what it was in the run's first ten steps."""
    length_max_factor: float = ranged_field(10.0, above=1)
    """Mean length in multiples of the same."""
    mismatch_factor: float = ranged_field(10.0, above=1)
    """Mean log-prob difference of engine and policy, in multiples of what it was in the run's first ten
    steps. `rollout.sync_tolerance` is its absolute limit (guard engine)."""
    disk_free_gib: float = ranged_field(5.0, least=0)
    """Free where the run is written, GiB."""
    host_memory_max: float = ranged_field(0.95, above=0)
    """Share of a host's memory in use."""
    host_memory_growth: float = ranged_field(0.2, above=0)
    """The same, above what it was in the first ten steps of this process."""

    @property
    def ending(self) -> list[str]:
        """The names in `end`."""
        return [name.strip() for name in self.end.split(",") if name.strip()]
