"""The record of a run's attempts as it is read: which there were, how they ended, whether one is alive.

    <remote>/<run id>/attempts/00000007.json        written once, when attempt 7 starts: its name, where the
                                                    run stood, how many restarts were left, and the
                                                    checkpoints that count (trainer/checkpoint/course.py)
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
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, structs, to_builtins

from trainer.config import ConfigError
from trainer.config.run_store import ATTEMPTS
from trainer.storage.seal import OPEN, ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.system.errors import ObjectTooLarge, StorageError
from trainer.system.exit_codes import EXIT_OK
from trainer.system.records import Count, Line, MalformedRecord, UnixTime, convert_record, decode_record
from trainer.system.terminal_text import terminal_line

BEAT_S = 60.0
"""Seconds between a living attempt's marks."""
ALIVE_S = 4 * BEAT_S
"""An attempt whose last mark is older than this is taken for dead."""


AttemptName = Annotated[str, Meta(pattern=r"^[0-9]{1,8}-[0-9a-z]{1,32}\Z")]
Reason = Annotated[str, Meta(max_length=1 << 16)]
ExitCode = Annotated[int, Meta(ge=-255, le=255)]
CountedKey = tuple[Count, Annotated[str, Meta(pattern=r"^([0-9]{1,8}-[0-9a-z]{1,32})?\Z")]]
"""(step, attempt) of a checkpoint; the attempt is "" in the oldest layout."""


class StartRecord(Struct, frozen=True):
    """What an attempt writes when it starts, once."""

    epoch: Count
    name: AttemptName
    """`7-3f2c1a`: the epoch, and what tells two attempts apart that took it at the same time."""
    launch: Line
    """Value of SPOTRL_LAUNCH."""
    committed: Count
    """Newest step that was committed when it started."""
    host: Line
    begun_unix_s: UnixTime
    left: Reason = ""
    """What was left of the restarts, in words."""
    counted: list[CountedKey] | None = None
    """The checkpoints that count; None in a record of an earlier version."""
    before: Count = 0


class OriginRecord(Struct, frozen=True):
    """The step that an attempt's own checkpoints go on from."""

    name: AttemptName
    step: Count


class BeatRecord(Struct, frozen=True):
    name: AttemptName
    unix_s: UnixTime


class EndRecord(Struct, frozen=True):
    name: AttemptName
    code: ExitCode
    why: Reason = ""
    left: Reason = ""
    died_at_step: Count | None = None
    """The step at which a process of the run died or hung while every machine answered, 0 before the first
    one; None for every other end."""
    unix_s: UnixTime = 0.0


class FinalRecord(Struct, frozen=True):
    """The run is over for good, as far as this launch goes."""

    code: ExitCode
    why: Reason
    launch: Line
    unix_s: UnixTime = 0.0


class MachinesRecord(Struct, frozen=True):
    launch: Line
    times: dict[str, Count]
    """Mark of a machine -> how often it failed its checks."""


class PastAttempt(StartRecord, frozen=True):
    """One attempt, as the record tells it. `left`: when it ended, else when it started."""

    end: EndRecord | None = None
    """None while it lives, and after a kill."""

    @property
    def code(self) -> int | None:
        return self.end.code if self.end else None

    @property
    def died_at_step(self) -> int | None:
        """The step at which a process of the run died."""
        return self.end.died_at_step if self.end else None

    @property
    def why(self) -> str:
        return self.end.why if self.end else ""


Kind = TypeVar(
    "Kind", bound=StartRecord | OriginRecord | BeatRecord | EndRecord | FinalRecord | MachinesRecord
)
MOST_BYTES = 1 << 20
"""The largest object of the record that is read: the list of checkpoints that count is the longest."""
MOST_GAP = 1000
"""Numbers that may be missing in a row. Attempts leave no gap, and a listing hides no more."""
OBJECT = re.compile(r"([0-9]{8})\.json")


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
        return self.final or self.attempt.why


class AttemptRecord:
    """The attempts of one run. storage: the folder that they lie in. seal: of the run; a desk, which only
    shows them, has none."""

    def __init__(self, storage: Storage, seal: Seal = OPEN) -> None:
        self.storage = storage
        self.seal = seal

    def newest(self, by_store: bool = False) -> NewestAttempt | None:
        """The newest attempt; None before the first. by_store: its age is taken by the store's own clock, for
        which a small object is written and removed; else by the clock of this machine, which may differ from
        the store's."""
        attempt = next(self._back_from_newest(), None)
        if attempt is None:
            return None
        final = self.final()
        over = final is not None and final.launch == attempt.launch
        now = time.time()
        silent_s = self._silent_s(attempt.epoch, by_store and attempt.code is None and not over)
        return NewestAttempt(
            attempt=attempt,
            seen_unix_s=attempt.begun_unix_s if silent_s is None else now - silent_s,
            silent_s=silent_s,
            final=final.why if final and over else None,
        )

    def _silent_s(self, epoch: int, by_store: bool) -> float | None:
        """Seconds since the last mark of an attempt, whatever the clock of its machine says; None where the
        store does not tell the time."""
        marks = (f"{epoch:08d}.beat.json", f"{epoch:08d}.json")
        times = [written_s for name in marks if (written_s := self.storage.written_s(name)) is not None]
        try:
            now = self.storage.clock_s() if by_store else time.time()
        except (ConfigError, FileNotFoundError, StorageError) as error:
            print(f"attempt: the store's clock cannot be read: {error}", file=sys.stderr, flush=True)
            return None
        return now - max(times) if times else None

    def alive(self) -> PastAttempt | None:
        """The newest attempt if it is alive, or if nobody can tell: ask before a second launch."""
        newest = self.newest(by_store=True)
        return newest.attempt if newest and newest.alive is not False else None

    def has_begun(self, launch: str, newest: int) -> bool:
        """Whether an attempt of a launch has begun, be it before a later launch that went on from it. newest:
        epoch of the newest attempt, 0 before the first."""
        return any(begun.launch == launch for begun in self.starts(newest))

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
        newest_first: list[PastAttempt] = []
        for attempt in self._back_from_newest():
            newest_first.append(attempt)
            if len(newest_first) > 1 and newest_first[-2].committed > newest_first[-1].committed:
                break
        return newest_first[::-1]

    def _back_from_newest(self) -> Iterator[PastAttempt]:
        """The attempts from the newest down; those that cannot be read are passed over. A listing may lag, or
        lie, so what follows the newest number in it is asked for by its key."""
        epochs = self._listed()
        while (newer := self.next_after(epochs[-1] if epochs else 0)) is not None:
            epochs.append(newer.epoch)
        for epoch in reversed(epochs):
            begun = self.read(epoch)
            if begun is not None:
                end = self.get(f"{epoch:08d}.end", EndRecord)
                left = (end.left if end else "") or begun.left
                fields: dict[str, Any] = structs.asdict(begun) | {"left": left, "end": end}
                yield PastAttempt(**fields)

    def starts(self, newest: int) -> Iterator[StartRecord]:
        """How the attempts began, from number `newest` down; those that cannot be read are passed over. Only
        numbers that are listed are asked for, and `newest` itself, which a listing may not show yet."""
        listed = {epoch for epoch in self._listed() if epoch < newest}
        for epoch in sorted(listed | {newest}, reverse=True):
            begun = self.read(epoch) if epoch > 0 else None
            if begun is not None:
                yield begun

    def read(self, epoch: int) -> StartRecord | None:
        return self.get(f"{epoch:08d}", StartRecord)

    def final(self) -> FinalRecord | None:
        """Why the run is over for good, or None. Raises ConfigError for a malformed object."""
        return self.get("final", FinalRecord)

    def next_after(self, epoch: int) -> StartRecord | None:
        """The record of the next attempt, or None. Numbers have no gaps, so a malformed one may hide another
        behind it."""
        while self.storage.exists(f"{epoch + 1:08d}.json"):
            epoch += 1
            begun = self.read(epoch)
            if begun is not None:
                return begun
        return None

    def write(self, name: str, value: Struct) -> None:
        self.storage.put_bytes(f"{name}.json", self._signed(name, value))

    def create(self, value: StartRecord) -> bool:
        """Writes an attempt's start; False if there was one of its epoch already."""
        name = f"{value.epoch:08d}"
        return self.storage.create(f"{name}.json", self._signed(name, value))

    def _signed(self, name: str, value: Struct) -> bytes:
        return json.dumps(self.seal.signed_json(f"{ATTEMPTS}/{name}.json", to_builtins(value))).encode()

    def get(self, name: str, kind: type[Kind]) -> Kind | None:
        """One object of the record; None where there is none, or a malformed or forged one, which is told.
        Raises ConfigError for a malformed `final.json`."""
        try:
            data = self.storage.get_bytes(f"{name}.json", MOST_BYTES)
            value = decode_record(data, dict, name)
            self.seal.check_json(f"{ATTEMPTS}/{name}.json", value)
            checked = convert_record(value, kind, name)
            if isinstance(checked, FinalRecord | MachinesRecord) or attempt_number(
                checked.name
            ) == attempt_number(name):
                return checked
            why = f"it is that of attempt {checked.name}"
        except (FileNotFoundError, ForgedObject):
            return None
        except (MalformedRecord, ObjectTooLarge) as error:
            why = str(error)
        problem = f"{self.storage.url}/{name}.json is not what an attempt writes ({terminal_line(why)})"
        if kind is FinalRecord:
            raise ConfigError(
                f"{problem}, so whether the run is over cannot be told: delete it to let the run start again"
            )
        print(f"attempt: {problem}: it is passed over", file=sys.stderr, flush=True)
        return None

    def _listed(self) -> list[int]:
        """The attempts' numbers, ascending. One that is far above the others is nobody's: attempts leave no
        gap."""
        numbers: list[int] = []
        for match in filter(None, (OBJECT.fullmatch(key) for key, _ in self.storage.list())):
            number = int(match[1])
            if number - (numbers[-1] if numbers else 0) > MOST_GAP:
                print(
                    f"attempt: {match[0]} follows no other attempt: it is passed over",
                    file=sys.stderr,
                    flush=True,
                )
                break
            numbers.append(number)
        return numbers

    def spent_s(self, launch: str, before: int = 0) -> float:
        """Seconds that the attempts of the newest launch have trained; 0 if that is another than `launch`.
        before: those of earlier numbers alone. Each is measured by the dates of the store that holds its
        objects: a machine's own clock may be a day off when it starts. One that was killed lived until its
        next mark at most."""
        newest = self.newest()
        last = before - 1 if before else newest.attempt.epoch if newest else 0
        total = 0.0
        for begun in self.starts(last):
            if begun.launch != launch:
                break
            name = f"{begun.epoch:08d}"
            since = self.storage.written_s(f"{name}.json") or begun.begun_unix_s
            ended = self.storage.written_s(f"{name}.end.json")
            seen = self.storage.written_s(f"{name}.beat.json") or since
            total += max(0.0, (ended or max(since, seen) + BEAT_S) - since)
        return total


def attempt_number(name: str) -> int:
    """The number that an attempt's name or object begins with; 0 where there is no name."""
    return int(re.split("[-.]", name)[0] or 0)
