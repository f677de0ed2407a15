"""What the record of a run's attempts says, as JSON: `python -m trainer.checkpoint
s3://bucket/prefix/RUN_ID`.

{"attempt": "7-3f2c1a", "host": ..., "seen_unix_s": ..., "alive": true, "code": null, "left": "...",
"final": null}; "left" says how many restarts are left, "final" is [exit code, why] of a run that is over for
good. "attempt" is null before the first. "seen_unix_s" is by the clock of this machine; "alive" is
null where nobody can tell. For the desk, before a second launch.
"""

from __future__ import annotations

import json
import sys

from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.command import exit_code
from trainer.storage.storage import Storage
from trainer.storage.store_probe import QUICK

SHOWN = {"attempt": "name", "host": "host", "code": "code", "left": "left"}


def run(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise ConfigError("usage: python -m trainer.checkpoint URL")
    record = AttemptRecord(Storage(RunStore(arguments[0].rstrip("/")).attempts, retry=QUICK))
    newest = record.newest(by_store=True)
    shown = {name: newest and getattr(newest.attempt, key) for name, key in SHOWN.items()}
    shown["seen_unix_s"] = newest and newest.seen_unix_s
    shown["alive"] = newest.alive if newest else False
    final = record.final()
    print(json.dumps(shown | {"final": final and [final.code, final.why]}))


def main(arguments: list[str]) -> int:
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
