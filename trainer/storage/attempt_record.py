"""The record of a run's attempts as it is read: which there were, how they ended, whether one is alive.

    <remote>/<run id>/attempts/00000007.json        written once, when attempt 7 starts: its name, where the
                                                    run stood, how many restarts were left
    <remote>/<run id>/attempts/00000007.beat.json   rewritten by its launcher while it lives
    <remote>/<run id>/attempts/00000007.end.json    how it ended, how many restarts are left; nothing after a
                                                    kill
    <remote>/<run id>/attempts/final.json           the run is over for good: no attempt may start
    <remote>/<run id>/attempts/machines.json        machines that failed their checks, and how often each

Without a store the record lies in the run's folder. Who may write it: trainer/checkpoint/attempt.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from typing import Any

from trainer.exit_codes import EXIT_OK
from trainer.storage.storage import Storage

BEAT_S = 60.0
"""Seconds between a living attempt's marks."""
ALIVE_S = 4 * BEAT_S
"""An attempt whose last mark is older than this is taken for dead."""


@dataclass(frozen=True)
class Past:
    """One attempt, as the record tells it."""

    epoch: int
    name: str
    """`7-3f2c1a`: the epoch, and what tells two attempts apart that took it at the same time."""
    launch: str
    """Value of SPOTRL_LAUNCH."""
    committed: int
    """Newest step that was committed when it started."""
    host: str
    begun_unix_s: float
    code: int | None = None
    """Exit code; None while it lives, and after a kill."""
    died_at_step: int | None = None
    """The step at which a process of the run died or hung while every machine answered, 0 before the first
    one; None for every other end."""
    why: str = ""
    """The reason that was given for its end."""
    left: str = ""
    """What was left of the restarts when it ended, else when it started, in words."""


STARTED = tuple(field.name for field in fields(Past) if field.default is MISSING)
"""Fields of `Past` that every attempt writes when it starts."""


@dataclass(frozen=True)
class Newest:
    """The newest attempt of a run, and whether it lives."""

    attempt: Past
    seen_unix_s: float
    """Its last mark."""
    final: str | None
    """Why the run is over for good; None while it is not."""

    @property
    def alive(self) -> bool:
        """Whether it has neither ended nor been silent for ALIVE_S."""
        if self.attempt.code is not None or self.final is not None:
            return False
        return time.time() - self.seen_unix_s < ALIVE_S

    @property
    def why(self) -> str:
        """The reason that was given for its end, or for the run's."""
        return self.final or self.attempt.why


class AttemptRecord:
    """The attempts of one run. storage: the folder that they lie in."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def newest(self) -> Newest | None:
        """The newest attempt; None before the first."""
        names = self._names()
        for epoch in reversed(_epochs(names)):
            attempt = self._attempt(epoch, names)
            if attempt is not None:
                break
        else:
            return None
        beat = self.mark(epoch) if f"{epoch:08d}.beat.json" in names else None
        final = self.content("final") if "final.json" in names else None
        over = final is not None and final["launch"] == attempt.launch
        return Newest(
            attempt=attempt,
            seen_unix_s=beat["unix_s"] if beat else attempt.begun_unix_s,
            final=final["why"] if final and over else None,
        )

    def final(self) -> tuple[int, str] | None:
        """(exit code, reason) of a run that is over for good."""
        marker = self.content("final")
        return (marker["code"], marker["why"]) if marker else None

    def alive(self) -> Past | None:
        """The newest attempt if it is alive: ask before a second launch."""
        newest = self.newest()
        return newest.attempt if newest and newest.alive else None

    def has_begun(self, launch: str, newest: int) -> bool:
        """Whether an attempt of a launch has begun, be it before a later launch that went on from it. newest:
        epoch of the newest attempt, 0 before the first."""
        for epoch in range(newest, 0, -1):
            attempt = self.read(epoch)
            if attempt is not None and attempt["launch"] == launch:
                return True
        return False

    def over(self, awaited: str = "") -> str:
        """Why the run needs no machine any more; empty while it may. awaited: a launch that may still be in a
        queue: what an earlier one came to says nothing of it."""
        newest = self.newest()
        if newest is None or (awaited and not self.has_begun(awaited, newest.attempt.epoch)):
            return ""
        if newest.attempt.code == EXIT_OK:
            return "the run has reached its last step"
        return newest.final or ""

    def past(self) -> list[Past]:
        """The attempts since the last that got further than the one before it, oldest first; the newest at
        least."""
        names = self._names()
        found: list[Past] = []
        for epoch in reversed(_epochs(names)):
            attempt = self._attempt(epoch, names)
            if attempt is None:
                continue
            found.append(attempt)
            if len(found) > 1 and found[-2].committed > found[-1].committed:
                break
        return found[::-1]

    def _names(self) -> set[str]:
        return {key for key, _ in self.storage.list()}

    def _attempt(self, epoch: int, names: Collection[str]) -> Past | None:
        """One attempt, with its end if `names`, the record's objects, hold one."""
        mine = self.read(epoch)
        if mine is None:
            return None
        end = (self.content(f"{epoch:08d}.end") if f"{epoch:08d}.end.json" in names else None) or {}
        return Past(
            **{name: mine[name] for name in STARTED},
            code=end.get("code"),
            died_at_step=end.get("died_at_step"),
            why=end.get("why", ""),
            left=end.get("left") or mine.get("left", ""),
        )

    def read(self, epoch: int) -> dict[str, Any] | None:
        """The record of an epoch, or None."""
        return self.content(f"{epoch:08d}")

    def mark(self, epoch: int) -> dict[str, Any] | None:
        """What the launcher of an epoch's attempt wrote last to say that it lives, or None."""
        return self.content(f"{epoch:08d}.beat")

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Writes one small object of the record."""
        self.storage.put_bytes(f"{name}.json", json.dumps(value).encode())

    def content(self, name: str) -> dict[str, Any] | None:
        """One object of the record; None where there is none."""
        try:
            return json.loads(self.storage.get_bytes(f"{name}.json"))
        except (FileNotFoundError, ValueError):
            return None

    def create(self, epoch: int, value: dict[str, Any]) -> bool:
        """Writes an epoch's record; False if it was there already."""
        return self.storage.create(f"{epoch:08d}.json", json.dumps(value).encode())


def _epochs(names: Collection[str]) -> list[int]:
    """The attempts' numbers, ascending."""
    return sorted(int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit())
