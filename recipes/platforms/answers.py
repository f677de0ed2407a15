"""What a platform says of a run: its state, place, end and cost, from what its program prints as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipes.platforms import programs
from recipes.records.run_record import RunRecord

STATES = {
    "SUCCEEDED": "finished",
    "DONE": "finished",
    "CANCELLED": "stopped",
    "TERMINATED": "stopped",
    "FAILED": "failed",
}
"""How a platform's word for an end begins, and ours."""
LAUNCH_FAILED = "launch failed"
"""State of a launch that its platform never took."""


@dataclass(frozen=True, kw_only=True)
class PlatformAnswer:
    """What a platform says of a run."""

    text: str
    """State, place and recoveries."""
    state: str = ""
    """In one word of ours: running, starting, finished, failed, stopped, gone."""
    why: str = ""
    """Why it failed or was stopped, where the platform says it."""
    ended_s: float = 0.0
    """Unix time from which on it costs nothing; 0: it may still cost."""
    usd: float | None = None
    """What the platform itself has counted."""
    usd_per_hour: float = 0.0
    """Dollars per hour of all nodes that it has rented now; 0 where that is not known."""
    rented: str = ""
    """What these are."""
    name: str = ""
    """The platform's own name for it, where it is not ours."""
    known: bool = True
    """False: the platform answered, and has no run of this name."""
    whole: bool = True
    """Whether there is no more to ask it for."""


@dataclass
class PlatformAnswers:
    """What the platforms' programs print, each asked once, however many runs one looks at."""

    price: Callable[[RunRecord, str, str, bool], float]
    """Dollars per hour of all nodes of a run, by the cloud, its GPU and whether it is spot; 0: not known."""
    printed: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def rows(self, *command: str) -> Any:
        """The JSON that a command prints; None if there is none."""
        if command not in self.printed:
            self.printed[command] = programs.printed_json(command)
        return self.printed[command]


def state_word(word: str) -> str:
    """Our word for a state that is an end; the platform's own for any other."""
    for theirs, ours in STATES.items():
        if word.upper().startswith(theirs):
            return ours
    return word.lower()


def is_end(word: str) -> bool:
    """Whether a platform's word for a state is that of an end."""
    return word.upper().startswith(tuple(STATES))


def merge_answers(jobs: list[PlatformAnswer]) -> PlatformAnswer:
    """What a platform says of several jobs, as of one."""
    lines = [f"worker {number}: {job.text}" for number, job in enumerate(jobs, 1)]
    counted = [job.usd for job in jobs if job.usd is not None]
    rented = [job.rented for job in jobs if job.rented]
    reasons = dict.fromkeys(job.why for job in jobs if job.why)
    # A job that the platform has forgotten does not count beside those that it knows.
    known = [job for job in jobs if job.known]
    last_s = max(job.ended_s for job in jobs)
    costing = any(not job.ended_s for job in known)
    states = Counter(job.state for job in known or jobs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if state)
    return PlatformAnswer(
        text="\n".join(lines),
        state=counts if len(states) > 1 else next(iter(states)),
        why="; ".join(reasons),
        ended_s=0.0 if costing else last_s,
        usd=sum(counted) if counted else None,
        usd_per_hour=sum(job.usd_per_hour for job in jobs),
        rented=", ".join(rented),
        known=bool(known),
        whole=all(job.whole for job in jobs),
    )
