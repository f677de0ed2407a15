"""What the record of a run's attempts says.

`python -m trainer.checkpoint s3://bucket/prefix/RUN_ID`, for the desk before a second launch, as JSON:
{"attempt": "7-3f2c1a", "host": ..., "seen_unix_s": ..., "alive": true, "code": null, "left": "...",
"final": null}; "left" says how many restarts are left, "final" is [exit code, why] of a run that is over for
good. "attempt" is null before the first. "seen_unix_s" is by the clock of this machine; "alive" is
null where nobody can tell.

`python -m trainer.checkpoint BUCKET RUN_ID` prints why the run is over, or nothing. A machine that is to
sample for it asks before anything large is installed or fetched: its job may have been looking for a machine
until after the run's end. Without the run's key it believes what anybody wrote.
"""

from __future__ import annotations

import json
import os
import sys

from trainer.checkpoint.attempt import LAUNCH_VARIABLE
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import QUICK
from trainer.system.exit_codes import exit_code
from trainer.system.terminal_text import terminal_line

SHOWN = {"attempt": "name", "host": "host", "code": "code", "left": "left"}


def run(arguments: list[str]) -> None:
    match arguments:
        case [url]:
            record = AttemptRecord(Storage(RunStore(url.rstrip("/")).attempts, retry=QUICK))
            newest = record.newest(by_store=True)
            shown = {name: newest and getattr(newest.attempt, key) for name, key in SHOWN.items()}
            shown["seen_unix_s"] = newest and newest.seen_unix_s
            shown["alive"] = newest.alive if newest else False
            final = record.final()
            print(json.dumps(shown | {"final": final and [final.code, final.why]}))
        case [bucket, run_id]:
            store = RunStore.in_bucket(bucket, run_id)
            record = AttemptRecord(Storage(store.attempts, retry=QUICK), Seal.of_environment(run_id))
            if why := record.over(os.environ.get(LAUNCH_VARIABLE, "")):
                print(terminal_line(why))
        case _:
            raise ConfigError("usage: python -m trainer.checkpoint URL | BUCKET RUN_ID")


def main(arguments: list[str]) -> int:
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
