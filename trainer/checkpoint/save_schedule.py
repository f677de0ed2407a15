"""When a run's state is saved: every so many steps, or as often as what a save costs says."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import Checkpoint
from trainer.hardware.save_interval import save_interval_s


class SaveSchedule:
    """What the last checkpoint took, and so which step is saved next."""

    def __init__(self, config: Checkpoint, say: Callable[[str], None]) -> None:
        self.config = config
        self._say = say
        self.write_s = 0.0
        """Seconds that the ranks needed to write the last checkpoint."""
        self.save_s = 0.0
        """The same, together with the seconds of the upload where there is a store."""
        self.stall_s = 0.0
        """Seconds that training stood still for the last checkpoint."""
        self.checkpoint_bytes = 0
        """Size of the last checkpoint, over all nodes."""
        self.interval_steps = max(1, config.every_steps)
        self.last_begun = 0
        """Step of the last checkpoint that was begun or resumed from."""
        self.repeats = False
        """Whether the last one failed, so that the next step is saved."""

    def begin(self, step: int) -> None:
        """A checkpoint of a step is begun."""
        self.last_begun = step
        self.repeats = False

    def wants(self, step: int, step_time_s: float, last: bool) -> bool:
        """Whether to save after `step`, as far as time goes. With every_steps 0 the first step is saved, to
        measure, and then as Daly's formula says. last: the run ends."""
        if last or self.repeats:
            return step != self.last_begun or self.repeats
        if self.config.every_steps == 0 and step_time_s > 0:
            if self.last_begun == 0 or self.save_s == 0:
                return step != self.last_begun
            self._adapt(step_time_s)
        if step - self.last_begun >= self.interval_steps:
            return True
        return step % self.interval_steps == 0 and step != self.last_begun

    def _adapt(self, step_time_s: float) -> None:
        """Sets the interval by what the last save cost, where that changes it by more than a quarter."""
        mtbf_s = self.config.mean_time_between_preemptions_s
        wanted_s = max(save_interval_s(max(self.stall_s, 0.001), mtbf_s), self.save_s)
        steps = max(1, round(wanted_s / step_time_s))
        if abs(steps - self.interval_steps) > 0.25 * self.interval_steps:
            self._say(
                f"saving every {steps} steps ({steps * step_time_s:.0f} s): a save stalls"
                f" {self.stall_s:.2f} s and commits after {self.save_s:.1f} s, one preemption in"
                f" {mtbf_s:.0f} s"
            )
            self.interval_steps = steps

    def fits(self, remaining_s: float, writes: int) -> bool:
        """Whether so many checkpoints would be written in the time that remains.

        What has not been measured is tried: nothing is lost by a save that the kill cuts off.
        """
        return writes * 1.3 * self.write_s + 0.5 < remaining_s

    def metrics(self) -> dict[str, float]:
        """Figures of the last checkpoint; they may differ between equal runs."""
        return {
            "perf/checkpoint_save_s": self.save_s,
            "perf/checkpoint_stall_s": self.stall_s,
            "perf/checkpoint_gib": self.checkpoint_bytes / 2**30,
            "perf/checkpoint_interval_steps": float(self.interval_steps),
        }
