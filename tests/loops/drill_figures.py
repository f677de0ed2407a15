"""What a drill's faults cost, one by one and in all."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field

from trainer.config import RunConfig

FAULTS = (
    "kill, fresh node",
    "kill, same node",
    "notice",
    "network cut",
    "server killed",
    "disk full",
    "byte flipped",
)


@dataclass
class Strike:
    """One fault and what it cost."""

    fault: str
    step: int
    """Step under way when it struck; 0 while the job was starting."""
    phase: str
    resumed_step: int | None = None
    """Step that the next start resumed from; None where the job lived on."""
    start_to_step_s: float | None = None
    """Seconds from the next start of the process to its first resumed step."""
    kill_to_commit_s: float | None = None
    """Seconds from the kill to the first checkpoint beyond the one resumed from; None if killed before."""
    start_parts_s: dict[str, float] = field(default_factory=dict)
    """What the next start told of itself: launch, place, load, resume, sync."""

    @property
    def lost_steps(self) -> int | None:
        """Steps whose work was thrown away, the one under way included."""
        return None if self.resumed_step is None or not self.step else max(0, self.step - self.resumed_step)


def summary(strikes: list[Strike], config: RunConfig) -> dict:
    """What the faults cost."""
    commits = [s.kill_to_commit_s for s in strikes if s.kill_to_commit_s is not None]
    parts = [s.start_parts_s for s in strikes if s.start_parts_s]
    middle = {part: statistics.median(p[part] for p in parts) for part in parts[0]} if parts else {}
    lost = [s.lost_steps for s in strikes if s.lost_steps is not None]
    resumed = [s.start_to_step_s for s in strikes if s.start_to_step_s is not None]
    by_fault: dict[str, list[int]] = {}
    for name in FAULTS:
        steps = [s.lost_steps for s in strikes if s.fault == name and s.lost_steps is not None]
        if steps:
            by_fault[name] = steps
    faults = Counter(strike.fault for strike in strikes)
    at_stake = [asdict(strike) | {"lost_steps": strike.lost_steps} for strike in strikes]
    return {
        "faults": {name: faults[name] for name in FAULTS},
        "steps": config.run.max_steps,
        "ranks": config.placement.world_size,
        "checkpoint_every_steps": config.checkpoint.every_steps,
        "steps_lost_per_preemption_mean": round(statistics.fmean(lost), 2) if lost else None,
        "steps_lost_per_preemption_max": max(lost, default=None),
        "steps_lost_by_fault": by_fault,
        "start_to_first_resumed_step_s_median": round(statistics.median(resumed), 1) if resumed else None,
        "start_to_first_resumed_step_s_max": max(resumed, default=None),
        "kill_to_next_commit_s_median": round(statistics.median(commits), 1) if commits else None,
        "start_parts_s_median": {part: round(seconds, 1) for part, seconds in middle.items()},
        "strikes": at_stake,
    }
