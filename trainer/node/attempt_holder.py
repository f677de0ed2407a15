"""The head's part in the record of attempts: starts one, checks that it stays the newest, records how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path

from trainer.checkpoint.attempt import (
    ATTEMPT_VARIABLE,
    BEAT_S,
    LAUNCH_VARIABLE,
    Attempt,
    Attempts,
    Fenced,
    start,
    url_of,
)
from trainer.checkpoint.layout import newest_step, remote_url
from trainer.config import ConfigError, RunConfig
from trainer.exit_codes import EXIT_FENCED
from trainer.node.run_lock import LAUNCHER_VARIABLE, RunLock
from trainer.observe.history import read_progress
from trainer.storage.probe import probe
from trainer.storage.storage import Storage, StorageError
from trainer.storage.stores import Retry


def mark(run_dir: str, status: str) -> None:
    """Read by `status` on this machine: how the run ended, if its driver could not write it."""
    state = read_progress(run_dir)
    if state and status:
        with contextlib.suppress(OSError):
            (Path(run_dir) / "progress.json").write_text(json.dumps(state | {"status": status}))


POLL_S = 15.0
"""Seconds between two checks for a newer attempt."""
BRIEF = Retry(attempts=1, request_retries=1, request_retry_s=3.0, stall_s=5.0)
"""Retries of the last record, written when little time may be left."""


class AttemptHolder:
    """One attempt from start to end. counts: whether an engine restarts this job; the restart budget then applies."""

    def __init__(self, config: RunConfig, counts: bool):
        self.config, self.counts = config, counts
        self.lock = RunLock(config.run.dir, "launcher")
        self.attempt: Attempt | None = None
        self.fenced = ""
        """Why this attempt has to stop, once it has been replaced."""
        self._over = threading.Event()

    def take(self) -> dict[str, str]:
        """Locks the run's folder, probes the store, starts an attempt. Returns environment variables for the driver.

        Raises ConfigError for a folder, store or permission that cannot work, StorageError for an unreachable store,
        Final where the run is over.
        """
        self.lock.take()
        if self.config.checkpoint.remote:
            probe(url_of(self.config))
        # Where no engine restarts the job, a person started it: the run is reopened.
        launch = os.environ.get(LAUNCH_VARIABLE) or ("" if self.counts else secrets.token_hex(4))
        self.attempt = start(self.config, launch)
        threading.Thread(target=self._watch, args=(self.attempt,), name="attempt", daemon=True).start()
        return {ATTEMPT_VARIABLE: self.attempt.name, LAUNCHER_VARIABLE: str(os.getpid())}

    def _watch(self, attempt: Attempt) -> None:
        beaten = 0.0
        while not self._over.is_set():
            try:
                if time.monotonic() - beaten > BEAT_S:
                    beaten = time.monotonic()
                    attempt.beat()
                else:
                    attempt.check()
            except Fenced as fenced:
                self.fenced = str(fenced)
                return
            except (ConfigError, StorageError) as error:  # the next check, or the next commit, will find it
                print(f"attempt: {error}", file=sys.stderr, flush=True)
            self._over.wait(POLL_S)

    def close(self, code: int, why: str) -> int:
        """Records how the job ended; returns the exit code."""
        self._over.set()
        self.lock.ending()
        if self.attempt is None or code == EXIT_FENCED:
            mark(self.config.run.dir, "fenced" if code == EXIT_FENCED else "")
            return code
        try:
            remote = remote_url(self.config)
            committed = newest_step(self.config, Storage(remote, retry=BRIEF) if remote else None)
            return Attempts.of(self.config, BRIEF).close(self.attempt, code, why, committed)
        except (ConfigError, StorageError, OSError) as error:
            print(f"attempt: its end is not recorded: {error}", file=sys.stderr, flush=True)
            return code
