"""Who may write for a run: the record of its attempts (trainer/storage/attempt_record.py) is taken here.

An attempt's number is the fencing epoch: whoever finds a higher one, or another name under its own, has been
replaced and never writes or deletes again. Numbers have no gaps, so that "is there a newer one" is one
look-up of one key, which every store answers truly, and no listing, which may lag.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from msgspec import structs

from trainer.checkpoint import course
from trainer.checkpoint.layout import (
    CheckpointKey,
    attempts_url,
    checkpoint_keys,
    newest_step,
    remote_folder,
    remote_url,
)
from trainer.config import RunConfig
from trainer.storage.attempt_record import (
    AttemptRecord,
    BeatRecord,
    EndRecord,
    FinalRecord,
    MachinesRecord,
    OriginRecord,
    PastAttempt,
    StartRecord,
    attempt_number,
)
from trainer.storage.seal import OPEN, Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError
from trainer.system.exit_codes import (
    EXIT_FENCED,
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_PREFLIGHT,
    EXIT_RAY,
    FINAL_EXIT_CODES,
)

ATTEMPT_VARIABLE = "SPOTRL_ATTEMPT"
"""Carries the attempt's name from the launcher to the driver."""
LAUNCH_VARIABLE = "SPOTRL_LAUNCH"
"""Names one launch from the desk. Restarts by the platform keep it; `resume` and a new `up` set another,
which opens a run that was over and starts its budget again."""
LOST = (None, EXIT_PREEMPTED, EXIT_NODE_LOST, EXIT_PREFLIGHT, EXIT_RAY)
"""Exit codes that are the fault of machines (None: killed without a word). Every other failure is the
job's own."""
FREE = (EXIT_OK, EXIT_INTERRUPTED, EXIT_FENCED, EXIT_GAVE_UP)
"""Exit codes that do not count against the budget of restarts."""

SAVE_S = 300.0
"""Seconds before the end of the run's hours at which it is told to save; a tenth of fewer hours."""
LEAST_S = 900.0
"""A restart with less time left than this is not made: the next start would take most of it."""
SAME_MACHINE = 3
"""How often one machine may fail its checks in one launch. A platform that assigns it once more has no
other."""

NEXT_SAVES = 3
"""Saves behind the newest listed one that are asked for at every start."""
HIDDEN_SAVES = 64
"""The same where nothing is listed of an attempt that had begun to save."""
MOST_NUMBERS = 1000
"""Numbers that a start tries for its attempt: each may be taken, or be hidden by a listing that lags."""


class AttemptFenced(RuntimeError):
    """A newer attempt of the run has started: this one may neither write nor delete any more."""


class RunIsFinal(RuntimeError):
    """The run is over for good. `code` is the exit code to leave with."""

    def __init__(self, code: int, why: str):
        super().__init__(f"{why}; `python3 launch.py resume` starts the run again")
        self.code = code


@dataclass(frozen=True)
class Machine:
    """One machine, whatever its address is today."""

    name: str
    marks: tuple[str, ...]
    """An id that no other machine has: the serial numbers of its GPUs, else its name."""


@dataclass(frozen=True)
class Attempt:
    """The right to write for a run, until a newer attempt takes it."""

    record: Attempts
    name: str

    @property
    def epoch(self) -> int:
        return attempt_number(self.name)

    def goes_on_from(self, step: int) -> None:
        """Notes the step that its own checkpoints go on from: what older attempts have after it counts no
        more. Comes before the first of them. Raises AttemptFenced."""
        self.check()
        self.record.write(f"{self.epoch:08d}.from", OriginRecord(self.name, step))

    def check(self) -> None:
        """Raises AttemptFenced if a newer attempt has started. Call it before every commit and every
        deletion."""
        newer = self.record.next_after(self.epoch)
        own = self.record.read(self.epoch)
        if newer is None and own is not None and own.name != self.name:
            newer = own
        if newer is not None:
            raise AttemptFenced(
                f"attempt {self.name} is over: attempt {newer.name} of this run started on {newer.host}"
                " and has taken over; this one has stopped, and what it had not committed is left out"
            )

    def beat(self) -> None:
        """Marks the attempt as alive. Raises AttemptFenced."""
        self.check()
        self.record.write(f"{self.epoch:08d}.beat", BeatRecord(self.name, time.time()))


def of_this_job(config: RunConfig, env: Mapping[str, str] = os.environ) -> Attempt:
    """The attempt that the launcher of this job has taken; without a launcher a new one. Raises
    RunIsFinal."""
    if name := env.get(ATTEMPT_VARIABLE):
        return Attempt(Attempts.of(config), name)
    return start_attempt(config, env.get(LAUNCH_VARIABLE) or secrets.token_hex(4))


def start_attempt(config: RunConfig, launch: str) -> Attempt:
    """A new attempt, which replaces every earlier one. Raises RunIsFinal, and what `Storage` does."""
    record = Attempts.of(config)
    committed = committed_step(config)
    newest = record.newest()
    if newest is not None:
        check_listing(config, record, newest.attempt.epoch, committed)
    return record.take(committed, launch)


def committed_step(config: RunConfig, retry: RetryPolicy | None = None) -> int:
    """Newest step of a run with a checkpoint that counts, here or in the store; 0 for none."""
    remote = remote_url(config)
    past = course.history_of(config, retry)
    storage = Storage(remote, retry=retry) if remote else None
    return newest_step(config, storage, course.rewound(config, past))


def check_listing(config: RunConfig, record: AttemptRecord, newest: int, committed: int) -> None:
    """Raises StorageError where the store keeps a checkpoint that counts and is newer than all that it
    lists: a start that believed an empty list would train from step 0 over the run's checkpoints, and
    prune them. They are asked for by key, which a store answers truly where its listing lags or lies: those
    that the newest attempt counted when it started, and those that it will have made since.

    newest: number of the newest attempt. committed: newest step that is listed.
    """
    remote = remote_url(config)
    begun = record.read(newest)
    if not remote or begun is None or config.checkpoint.before:
        return
    storage = Storage(remote, retry=record.storage.retry)
    for step, attempt in _newer_than(config, record, begun, committed):
        key = f"{remote_folder(step, attempt)}/manifest.json"
        if storage.exists(key):
            raise StorageError(
                f"{storage.url} lists nothing newer than step {committed}, and keeps {key}: a start that"
                " believed the list would lose that. Start again when its listing is whole"
            )


def _newer_than(
    config: RunConfig, record: AttemptRecord, begun: StartRecord, committed: int
) -> Iterator[CheckpointKey]:
    """The checkpoints after step `committed` that there may be, as the newest attempt's record tells."""
    for step, attempt in begun.counted or []:
        if step > committed:
            yield step, attempt
    origin = record.get(f"{begun.epoch:08d}.from", OriginRecord)
    if origin is None:
        return  # it has saved nothing of its own
    # Saves come every so many steps, or by the time they take, the first of those right behind the origin.
    every = config.checkpoint.every_steps or 1
    saves = HIDDEN_SAVES if committed <= origin.step else NEXT_SAVES
    first = max(origin.step, committed) // every + 1
    for number in range(first, first + saves):
        yield number * every, begun.name


class Attempts(AttemptRecord):
    """The attempts of one run, for those who may take one. storage: the folder that they lie in. config: of
    the run, and of its seal; without it an attempt does not note which checkpoints count, and its history is
    that of the one before."""

    def __init__(
        self,
        storage: Storage,
        max_restarts: int = 3,
        max_losses: int = 10,
        config: RunConfig | None = None,
        max_hours: float = math.inf,
        seal: Seal = OPEN,
    ):
        super().__init__(storage, Seal.of(config) if config else seal)
        self.config = config
        self.max_restarts = max_restarts
        self.max_losses = max_losses
        self.max_hours = max_hours

    @classmethod
    def of(cls, config: RunConfig, retry: RetryPolicy | None = None) -> Attempts:
        """The record of a run. Raises ConfigError for a store that cannot work."""
        limits = config.checkpoint
        storage = Storage(attempts_url(config), retry=retry)
        return cls(storage, limits.max_restarts, limits.max_losses, config, limits.max_hours)

    def take(self, committed: int, launch: str = "") -> Attempt:
        """Starts an attempt, which replaces every earlier one. committed: newest committed step of the run.
        Raises RunIsFinal where the run is over, or has spent its restarts: then it is over from here on."""
        final = self.final()
        if final is not None and final.launch == launch:
            raise RunIsFinal(final.code, final.why)
        past = self.past()
        left = self._refuse_spent(past, launch, committed)
        self._refuse_late(launch, committed)
        epoch = past[-1].epoch + 1 if past else 1
        counted = self._counted(epoch - 1)
        before = self.config.checkpoint.before if self.config else 0
        tried = 0
        while True:
            name = f"{epoch}-{secrets.token_hex(3)}"
            host, now = socket.gethostname(), time.time()
            if self.create(StartRecord(epoch, name, launch, committed, host, now, left, counted, before)):
                return Attempt(self, name)
            epoch += 1
            tried += 1
            if tried == MOST_NUMBERS:
                raise StorageError(
                    f"{self.storage.url} keeps nothing of what it acknowledges: {tried} records of an attempt"
                    " were written and could not be read"
                )

    def _counted(self, newest: int) -> list[CheckpointKey] | None:
        """The checkpoints that count for a new attempt. newest: number of the newest one."""
        if self.config is None:
            return None
        remote = remote_url(self.config)
        storage = Storage(remote, retry=self.storage.retry) if remote else None
        counts = course.rewound(self.config, course.history_from_record(self, newest))
        return sorted(key for key in checkpoint_keys(self.config, storage) if counts(*key))

    def count(
        self, committed: int, launch: str, code: int, why: str, machines: Collection[Machine] = ()
    ) -> int:
        """Counts a start that failed before it could take an attempt; returns the exit code to leave with.
        machines: those that failed their checks. Raises RunIsFinal where the run is over. Replaces nothing
        that lives: a second launch that fails leaves the first alone; in one launch the platform starts again
        what has ended."""
        other = self.alive()
        if other is not None and (not launch or other.launch != launch):
            return code
        return self.close(self.take(committed, launch), code, why, committed, machines)

    def close(
        self,
        attempt: Attempt,
        code: int,
        why: str,
        committed: int,
        machines: Collection[Machine] = (),
        died_at_step: int | None = None,
    ) -> int:
        """Records how an attempt ended; returns the exit code to leave with. Where no restart can help, or
        none is left, the run is over for good, so that the platform need not start once more to find out.
        machines: those that failed their checks. died_at_step: as in `PastAttempt`. An attempt that was
        replaced writes nothing, however it ends: what it came to says nothing of the run, which goes on."""
        if code == EXIT_FENCED:
            return code
        try:
            attempt.check()
        except AttemptFenced as fenced:
            print(f"error: {fenced}", flush=True)
            return EXIT_FENCED
        end = EndRecord(attempt.name, code, why, died_at_step=died_at_step, unix_s=time.time())
        self.write(f"{attempt.epoch:08d}.end", end)
        past = [earlier for earlier in self.past() if earlier.epoch <= attempt.epoch]
        launch = past[-1].launch if past else ""
        if code in FINAL_EXIT_CODES:
            self.finish(code, why, launch)
        elif code not in FREE:
            try:
                self._remember(machines, why, launch)
                left = self._refuse_spent(past, launch, committed)
                self._refuse_late(launch, committed)
                self.write(f"{attempt.epoch:08d}.end", structs.replace(end, left=left))
            except RunIsFinal as final:
                print(f"error: {final}", flush=True)
                return final.code
        return code

    def _remember(self, machines: Collection[Machine], why: str, launch: str) -> None:
        """Counts machines that failed their checks. Raises RunIsFinal, and ends the run, where one came too
        often."""
        if not machines:
            return
        known = self.get("machines", MachinesRecord)
        times = known.times if known and known.launch == launch else {}
        counted = {}
        for machine in machines:
            counted[machine.name] = 1 + max(times.get(mark, 0) for mark in machine.marks)

        times |= {mark: counted[machine.name] for machine in machines for mark in machine.marks}
        self.write("machines", MachinesRecord(launch, times))
        name, most = max(counted.items(), key=lambda item: item[1])
        if most >= SAME_MACHINE:
            why = (
                f"the run gives up: machine {name} has failed its checks {most} times and comes again and"
                f" again ({why or 'see its lines above'}): exclude it, or take another region or GPU"
            )
            self._give_up(why, launch)

    def finish(self, code: int, why: str, launch: str) -> None:
        """Ends the run for good."""
        self.write("final", FinalRecord(code, why, launch, time.time()))

    def _give_up(self, why: str, launch: str) -> NoReturn:
        self.finish(EXIT_GAVE_UP, why, launch)
        raise RunIsFinal(EXIT_GAVE_UP, why)

    def _refuse_late(self, launch: str, committed: int) -> None:
        """Raises RunIsFinal, and ends the run, if the attempts of the launch have used up the hours of
        the run."""
        if math.isinf(self.max_hours):
            return
        spent_s = self.spent_s(launch)
        left_s = 3600 * self.max_hours - spent_s
        if spent_s and left_s < min(LEAST_S, 360 * self.max_hours):
            why = (
                f"its attempts have taken {spent_s / 3600:.1f} h, and budget.max_hours is {self.max_hours:g}"
            )
            self._give_up(f"the run ends at step {committed}: {why}", launch)

    def _refuse_spent(self, past: list[PastAttempt], launch: str, committed: int) -> str:
        """How many of which failures are left, for `status`; "" while nothing has failed. Raises RunIsFinal,
        and ends the run, if the attempts since the last new commit have spent the budget, or a process has
        died twice at one step."""
        failed = lost = 0
        deaths: list[PastAttempt] = []  # the newest first
        for attempt in reversed(past):
            if attempt.launch != launch:
                break
            if attempt.died_at_step is not None:
                deaths.append(attempt)
            if committed > attempt.committed:
                break  # it has committed, and then ended: its death is the first since that commit
            committed = attempt.committed
            if attempt.code in LOST:
                lost += 1
            elif attempt.code not in FREE:
                failed += 1

        why = ""
        if len(deaths) > 1 and deaths[0].died_at_step == deaths[1].died_at_step:
            # The same end on other machines is the run's. Machines that were lost in between say nothing.
            why = (
                f"it has died twice {_at(deaths[0].died_at_step)} with no new checkpoint between"
                f" ({deaths[0].why or 'no reason was given'}): that is the run's, and other machines would"
                " meet it again. See docs/failures.md on memory"
            )
        elif failed > self.max_restarts:
            limit = f"checkpoint.max_restarts {self.max_restarts}"
            why = f"{failed} attempts failed with no new checkpoint ({limit})"
        elif lost > self.max_losses:
            limit = f"checkpoint.max_losses {self.max_losses}"
            why = f"{lost} attempts lost their machines with no new checkpoint ({limit})"
        if why:
            self._give_up(f"the run gives up at step {committed}: {why}", launch)
        if not (failed or lost):
            return ""
        failures, losses = self.max_restarts - failed, self.max_losses - lost
        left = f"left before the next checkpoint: failures {failures}, lost machines {losses}"
        return f"{left}; one more death {_at(deaths[0].died_at_step)} ends the run" if deaths else left


def _at(step: int | None) -> str:
    return f"at step {step}" if step else "at its start"
