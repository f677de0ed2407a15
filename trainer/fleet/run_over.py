"""Whether a run is over: `python -m trainer.fleet.run_over BUCKET RUN`, which prints why, or nothing.

A machine that is to sample for the run asks before anything large is installed or fetched: its job may have
been looking for a machine until after the run's end. Needs an object-store client. Without the run's key it
believes what anybody wrote.
"""

from __future__ import annotations

import os
import sys

from trainer.checkpoint.attempt import LAUNCH_VARIABLE
from trainer.config.run_store import RunStore
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.command import exit_code
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.storage.store_probe import QUICK
from trainer.system.terminal_text import terminal_line


def print_why_over(bucket: str, run_id: str) -> None:
    """Prints why the run is over, if it is. Raises ConfigError, StorageError."""
    store = RunStore.in_bucket(bucket, run_id)
    record = AttemptRecord(Storage(store.attempts, retry=QUICK), Seal.of_environment(run_id))
    why = record.over(os.environ.get(LAUNCH_VARIABLE, ""))
    if why:
        print(terminal_line(why))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: print_why_over(sys.argv[1], sys.argv[2])))
