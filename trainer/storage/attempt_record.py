"""The record of a run's attempts as it is read: which there were, how they ended, whether one is alive.

    <remote>/<run id>/attempts/00000007.json        written once, when attempt 7 starts: its name, where the
                                                    run stood, how many restarts were left, and the
                                                    checkpoints that count (trainer/checkpoint/history.py)
    <remote>/<run id>/attempts/00000007.from.json   before its first checkpoint: the step that it goes on from
    <remote>/<run id>/attempts/00000007.beat.json   rewritten by its launcher while it lives
    <remote>/<run id>/attempts/00000007.end.json    how it ended, how many restarts are left; nothing after a
                                                    kill
    <remote>/<run id>/attempts/final.json           the run is over for good: no attempt may start
    <remote>/<run id>/attempts/machines.json        machines that failed their checks, and how often each

Without a store the record lies in the run's folder. Who may write it: trainer/checkpoint/attempt.py. What is
read is checked: a malformed object is named and passed over, but `final.json`, without which nobody can tell
whether the run may start. Of a run with a key every object is signed (trainer/storage/seal.py); one that is
not is a stranger's, and passed over whatever it says.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields
from typing import Any

from trainer.config import ConfigError
from trainer.config.run_store import ATTEMPTS
from trainer.storage.seal import OPEN, ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_OK

BEAT_S = 60.0
"""Seconds between a living attempt's marks."""
ALIVE_S = 4 * BEAT_S
"""An attempt whose last mark is older than this is taken for dead."""


@dataclass(frozen=True)
class PastAttempt:
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


STARTED = tuple(field.name for field in fields(PastAttempt) if field.default is MISSING)
"""Fields of `PastAttempt` that every attempt writes when it starts."""

# --- what an object of the record must be ---------------------------------------------------------------

Check = Callable[[Any], bool]
NAME = re.compile(r"\d+-[0-9a-z]{1,32}")
"""An attempt's name."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return _is_text(value) and NAME.fullmatch(value) is not None


def _is_whole(value: Any) -> bool:
    return type(value) is int  # True is an int too


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_step_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_counted(value: Any) -> bool:
    """Whether this is a list of [step, name of an attempt], the name "" in the oldest layout."""
    if not isinstance(value, list):
        return False
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        if not _is_count(pair[0]) or not (pair[1] == "" or _is_name(pair[1])):
            return False
    return True


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


NEEDED: dict[str, dict[str, Check]] = {
    "": {
        "epoch": _is_count,
        "name": _is_name,
        "launch": _is_text,
        "committed": _is_count,
        "host": _is_text,
        "begun_unix_s": _is_time,
    },
    "beat": {"name": _is_name, "unix_s": _is_time},
    "from": {"name": _is_name, "step": _is_count},
    "end": {"name": _is_name, "code": _is_whole},
    "final": {"code": _is_whole, "why": _is_text, "launch": _is_text},
    "machines": {"launch": _is_text, "times": _are_times},
}
"""Kind of an object -> the fields that it must have."""
ALLOWED: dict[str, dict[str, Check]] = {
    "": {"left": _is_text, "counted": _is_counted, "before": _is_count},
    "end": {"why": _is_text, "left": _is_text, "died_at_step": _is_step_or_none},
}
"""The same for fields that it may have."""


def well_formed(name: str, value: Any) -> bool:
    """Whether an object of the record is what its readers rely on. name: of the object, without `.json`."""
    number, _, kind = name.partition(".") if name[:1].isdigit() else ("", "", name)
    if not isinstance(value, dict):
        return False
    for field, check in NEEDED[kind].items():
        if field not in value or not check(value[field]):
            return False
    for field, check in ALLOWED.get(kind, {}).items():
        if field in value and not check(value[field]):
            return False
    return not number or int(value["name"].partition("-")[0]) == int(number)


@dataclass(frozen=True)
class NewestAttempt:
    """The newest attempt of a run, and whether it lives."""

    attempt: PastAttempt
    seen_unix_s: float
    """Its last mark, by the clock of this machine."""
    silent_s: float | None
    """Seconds since that; None where nobody can tell."""
    final: str | None
    """Why the run is over for good; None while it is not."""

    @property
    def alive(self) -> bool | None:
        """Whether it has neither ended nor been silent for ALIVE_S; None where nobody can tell."""
        if self.attempt.code is not None or self.final is not None:
            return False
        return None if self.silent_s is None else self.silent_s < ALIVE_S

    @property
    def why(self) -> str:
        """The reason that was given for its end, or for the run's."""
        return self.final or self.attempt.why


class AttemptRecord:
    """The attempts of one run. storage: the folder that they lie in. seal: of the run; a desk, which only
    shows them, has none."""

    def __init__(self, storage: Storage, seal: Seal = OPEN) -> None:
        self.storage = storage
        self.seal = seal

    def newest(self, by_store: bool = False) -> NewestAttempt | None:
        """The newest attempt; None before the first.

        by_store: its age is taken by the store's own clock, for which a small object is written and removed;
        else by the clock of this machine, which may differ from the store's.
        """
        names = self._names()
        for epoch in reversed(_epochs(names)):
            attempt = self._attempt(epoch, names)
            if attempt is not None:
                break
        else:
            return None
        final = self.content("final") if "final.json" in names else None
        over = final is not None and final["launch"] == attempt.launch
        now = time.time()
        silent_s = self._silent_s(epoch, by_store and attempt.code is None and not over)
        return NewestAttempt(
            attempt=attempt,
            seen_unix_s=attempt.begun_unix_s if silent_s is None else now - silent_s,
            silent_s=silent_s,
            final=final["why"] if final and over else None,
        )

    def _silent_s(self, epoch: int, by_store: bool) -> float | None:
        """Seconds since the last mark of an attempt, whatever the clock of its machine says; None where the
        store does not tell the time."""
        marks = (f"{epoch:08d}.beat.json", f"{epoch:08d}.json")
        times = [found for name in marks if (found := self.storage.written_s(name)) is not None]
        try:
            now = self.storage.clock_s() if by_store else time.time()
        except (ConfigError, FileNotFoundError, StorageError) as error:
            print(f"attempt: the store's clock cannot be read: {error}", file=sys.stderr, flush=True)
            return None
        return now - max(times) if times else None

    def final(self) -> tuple[int, str] | None:
        """(exit code, reason) of a run that is over for good."""
        marker = self.content("final")
        return (marker["code"], marker["why"]) if marker else None

    def alive(self) -> PastAttempt | None:
        """The newest attempt if it is alive, or if nobody can tell: ask before a second launch."""
        newest = self.newest(by_store=True)
        return newest.attempt if newest and newest.alive is not False else None

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

    def past(self) -> list[PastAttempt]:
        """The attempts since the last that got further than the one before it, oldest first; the newest at
        least."""
        names = self._names()
        found: list[PastAttempt] = []
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

    def _attempt(self, epoch: int, names: Collection[str]) -> PastAttempt | None:
        """One attempt, with its end if `names`, the record's objects, hold one."""
        mine = self.read(epoch)
        if mine is None:
            return None
        end = (self.content(f"{epoch:08d}.end") if f"{epoch:08d}.end.json" in names else None) or {}
        return PastAttempt(
            **{name: mine[name] for name in STARTED},
            code=end.get("code"),
            died_at_step=end.get("died_at_step"),
            why=end.get("why", ""),
            left=end.get("left") or mine.get("left", ""),
        )

    def read(self, epoch: int) -> dict[str, Any] | None:
        """The record of an epoch, or None."""
        return self.content(f"{epoch:08d}")

    def next_after(self, epoch: int) -> dict[str, Any] | None:
        """The record of the next attempt, or None. Numbers have no gaps, so a malformed one may hide another
        behind it."""
        while self.storage.exists(f"{epoch + 1:08d}.json"):
            epoch += 1
            found = self.read(epoch)
            if found is not None:
                return found
        return None

    def mark(self, epoch: int) -> dict[str, Any] | None:
        """What the launcher of an epoch's attempt wrote last to say that it lives, or None."""
        return self.content(f"{epoch:08d}.beat")

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Writes one small object of the record."""
        self.storage.put_bytes(f"{name}.json", self._signed(name, value))

    def _signed(self, name: str, value: dict[str, Any]) -> bytes:
        return json.dumps(self.seal.signed_json(f"{ATTEMPTS}/{name}.json", value)).encode()

    def content(self, name: str) -> dict[str, Any] | None:
        """One object of the record; None where there is none, or a malformed or forged one, which is told.

        Raises ConfigError for a malformed `final.json`.
        """
        try:
            data = self.storage.get_bytes(f"{name}.json")
        except FileNotFoundError:
            return None
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        try:
            self.seal.check_json(f"{ATTEMPTS}/{name}.json", value)
        except ForgedObject:
            return None
        if well_formed(name, value):
            return value
        what = f"{self.storage.url}/{name}.json is not what an attempt writes"
        if name == "final":
            raise ConfigError(
                f"{what}, so whether the run is over cannot be told: delete it to let the run start again"
            )
        print(f"attempt: {what}: it is passed over", file=sys.stderr, flush=True)
        return None

    def create(self, epoch: int, value: dict[str, Any]) -> bool:
        """Writes an epoch's record; False if it was there already."""
        name = f"{epoch:08d}"
        return self.storage.create(f"{name}.json", self._signed(name, value))


def _epochs(names: Collection[str]) -> list[int]:
    """The attempts' numbers, ascending."""
    return sorted(int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit())
