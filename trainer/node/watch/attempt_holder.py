"""The head's part in the record of attempts: starts one, checks that it stays the newest, records how it
ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.attempt import (
    ATTEMPT_VARIABLE,
    LAUNCH_VARIABLE,
    LOST,
    Attempt,
    AttemptFenced,
    Attempts,
    Machine,
    RunIsFinal,
    committed_step,
    start_attempt,
)
from trainer.checkpoint.course import check_resumable
from trainer.checkpoint.layout import attempts_url
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import LAUNCH_LOG, PROGRESS, read_progress, write_whole
from trainer.config.run_store import RunStore
from trainer.data.dataset import Dataset
from trainer.node.preflight import findings
from trainer.node.preflight.findings import Finding
from trainer.node.preflight.precheck import precheck
from trainer.node.watch.run_lock import LAUNCHER_VARIABLE, RunLock
from trainer.observe.stream import Stream
from trainer.storage.attempt_record import BEAT_S
from trainer.storage.storage import Storage, probe_store
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError
from trainer.system.exit_codes import (
    EXIT_FENCED,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_PREEMPTED,
    describe_code,
)


def note_end(run_dir: str, code: int, why: str, job_why: str) -> None:
    """Puts why a launch ended where `status`, the log and the report find it. why: what the launcher found,
    which the job's log does not have. job_why: what the job said."""
    lines = (why or job_why).strip().splitlines()
    reason = lines[-1] if lines else describe_code(code)  # of a traceback its last line
    with contextlib.suppress(OSError):
        if why and code not in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            with (Path(run_dir) / LAUNCH_LOG).open("a", encoding="utf-8") as log:
                log.write(f"error: {why}\n")
        state = read_progress(run_dir)
        if state:
            end = {"code": code, "why": reason, "ended_unix_s": time.time()}
            write_whole(Path(run_dir) / PROGRESS, json.dumps(state | end).encode())


POLL_S = 15.0
"""Seconds between two checks for a newer attempt."""
REFUSED = "refused"
"""File in the run's folder: host names of machines that failed their checks. Slurm's script excludes them."""
BRIEF = RetryPolicy(attempts=1, request_retries=1, request_retry_s=3.0, stall_s=5.0)
"""Retries of the last record, written when little time may be left."""


def count_failed_start(
    config: RunConfig, code: int, why: str, judged: list[Finding], machines: Mapping[int, Machine]
) -> int:
    """Counts a start that failed before it took an attempt; returns the exit code to leave with. Otherwise a
    platform that gets bad machines would rent and give them back without end. machines: by rank."""
    if code not in LOST:
        return code
    bad = [machines[rank] for rank in findings.failed_machines(judged) if rank in machines]

    why = why or next(
        (finding.figure for finding in judged if finding.level == "fail" and finding.machine), ""
    )
    try:
        if bad:
            with (Path(config.run.dir) / REFUSED).open("a") as file:
                file.writelines(f"{machine.name}\n" for machine in bad)
        committed = committed_step(config, BRIEF)
        launch = os.environ.get(LAUNCH_VARIABLE, "")
        return Attempts.of(config, BRIEF).count(committed, launch, code, why, bad)
    except RunIsFinal as final:
        print(f"error: {final}", file=sys.stderr, flush=True)
        return final.code
    except (ConfigError, StorageError, OSError) as error:
        print(f"attempt: this start is not counted: {error}", file=sys.stderr, flush=True)
        return code


class AttemptHolder:
    """One attempt from start to end. counts: whether the platform restarts this job; the restart budget then
    applies."""

    def __init__(self, config: RunConfig, counts: bool, trains: bool):
        """trains: whether the job is one of the trainer's loops, whose model, data and checkpoint can be
        checked."""
        self.config = config
        self.counts, self.trains = counts, trains
        self.lock = RunLock(config.run.dir, "launcher")
        self.attempt: Attempt | None = None
        self.fenced = ""
        """Why this attempt has to stop, once it has been replaced."""
        self.until = math.inf
        """When the run's hours are over, by time.monotonic()."""
        self._over = threading.Event()
        self._stream: Stream | None = None

    def take(self) -> dict[str, str]:
        """Locks the run's folder, probes the store, starts an attempt. Returns environment variables for the
        driver. Raises ConfigError for a folder, store, permission, model, dataset or checkpoint that cannot
        work, StorageError for an unreachable store, Final where the run is over."""
        self.lock.take()
        if self.config.checkpoint.remote:
            probe_store(attempts_url(self.config))
        if self.trains:
            # All that can refuse this start comes before it replaces an attempt that may be alive.
            precheck(self.config)
            train_set = Dataset(self.config.data.path, self.config.data.split)
            check_resumable(self.config, train_set.fingerprint)
        # Where no platform restarts the job, a person started it: the run is reopened.
        launch = os.environ.get(LAUNCH_VARIABLE) or ("" if self.counts else secrets.token_hex(4))
        return self._begin(launch) | {LAUNCHER_VARIABLE: str(os.getpid())}

    def start_again_here(self, why: str, died_at_step: int) -> dict[str, str]:
        """Ends this attempt, of which a rank's process died, and starts the next one here: variables for its
        driver. {}: the machines are to be given back, since the attempt has brought no new checkpoint (a
        broken GPU ends each before one), or another attempt cannot be started."""
        assert self.attempt is not None
        try:
            self.attempt.check()
            begun = self.attempt.record.read(self.attempt.epoch)
            committed = committed_step(self.config)
            if begun is None or committed <= begun.committed:
                return {}
            why = why or "a rank's process died"
            self.attempt.record.close(self.attempt, EXIT_NODE_LOST, why, committed, died_at_step=died_at_step)
            self._over.set()
            return self._begin(begun.launch)
        except AttemptFenced as fenced:
            self.fenced = str(fenced)
            print(f"error: {fenced}", file=sys.stderr, flush=True)
            return {}
        except (ConfigError, StorageError, RunIsFinal, OSError) as error:
            print(f"attempt: no further one can be started here: {error}", file=sys.stderr, flush=True)
            return {}

    def _begin(self, launch: str) -> dict[str, str]:
        if self._stream is not None:  # of the attempt before
            self._stream.close()
        self.attempt = start_attempt(self.config, launch)
        spent_s = self.attempt.record.spent_s(launch, before=self.attempt.epoch)
        self.until = time.monotonic() + 3600 * self.config.checkpoint.max_hours - spent_s
        self._over = threading.Event()
        store = RunStore.of(self.config)
        every_s = self.config.logging.push_every_s
        if store and every_s:
            storage = Storage(store.root, retry=BRIEF)
            self._stream = Stream(self.config.run.dir, storage, self.attempt.name, every_s, self.is_fenced)
        threading.Thread(
            target=self._watch, args=(self.attempt, self._over), name="attempt", daemon=True
        ).start()
        return {ATTEMPT_VARIABLE: self.attempt.name}

    def is_fenced(self) -> bool:
        return bool(self.fenced)

    def _watch(self, attempt: Attempt, over: threading.Event) -> None:
        beaten = 0.0
        while not over.is_set():
            try:
                if time.monotonic() - beaten > BEAT_S:
                    beaten = time.monotonic()
                    attempt.beat()
                else:
                    attempt.check()
            except AttemptFenced as fenced:
                if not over.is_set():
                    self.fenced = str(fenced)
                return
            except (ConfigError, StorageError) as error:  # the next check, or the next commit, will find it
                print(f"attempt: {error}", file=sys.stderr, flush=True)
            over.wait(POLL_S)

    def close(self, code: int, why: str, died_at_step: int | None = None) -> int:
        """Pushes the last of the stream, and records how the job ended; returns the exit code to leave with.
        died_at_step: as in the record (`PastAttempt`)."""
        self._over.set()
        self.lock.ending()
        code = EXIT_FENCED if self.fenced else code
        if code == EXIT_FENCED:
            self.fenced = self.fenced or why or "replaced"
        if self._stream is not None:
            self._stream.close()
        if code == EXIT_FENCED and (state := read_progress(self.config.run.dir)):
            with contextlib.suppress(OSError):
                end = json.dumps(state | {"status": "fenced"}).encode()
                write_whole(Path(self.config.run.dir) / PROGRESS, end)
        if self.attempt is None or code == EXIT_FENCED:
            return code
        try:
            record = Attempts.of(self.config, BRIEF)
            return record.close(
                self.attempt, code, why, committed_step(self.config, BRIEF), died_at_step=died_at_step
            )
        except (ConfigError, StorageError, OSError) as error:
            print(f"attempt: its end is not recorded: {error}", file=sys.stderr, flush=True)
            return code
