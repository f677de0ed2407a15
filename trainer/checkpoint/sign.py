"""Signs a run's bucket with the run's key: `python -m trainer.checkpoint.sign s3://bucket/RUN_ID`, with
SPOTRL_FLEET_KEY set.

For a run that began without a key, or that an older version of this code wrote: of a run with one nothing is
read that is not signed. Whoever runs this vouches for all that lies there by now, whoever wrote it. No
trainer of the run may live meanwhile.
"""

from __future__ import annotations

import re
import sys

import msgspec

from trainer.checkpoint.layout import remote_folder
from trainer.checkpoint.manifest import every_manifest, pack
from trainer.checkpoint.rollout_place import OBJECT
from trainer.config import ConfigError
from trainer.config.run_store import ROLLOUTS, RunStore
from trainer.storage.attempt_record import AttemptRecord
from trainer.storage.command import exit_code
from trainer.storage.seal import Seal, read_secret
from trainer.storage.storage import Storage

RECORD = re.compile(r"(\d{8}(\.[a-z]+)?|final|machines)\.json")


def sign_run(root: str) -> dict[str, int]:
    """Signs all that is whole of the record of attempts, of checkpoints' manifests and of rollout logs;
    returns how many of each. root: BUCKET/RUN. Raises ConfigError without a key, StorageError."""
    root = root.rstrip("/")
    seal = Seal(root.rpartition("/")[2], read_secret())
    store = RunStore(root)
    signed = {"records of attempts": 0, "checkpoints": 0, "rollout logs": 0}

    attempts = Storage(store.attempts)
    anybodys, own = AttemptRecord(attempts), AttemptRecord(attempts, seal)
    for key, _ in attempts.list():
        match = RECORD.fullmatch(key)
        value = anybodys.content(match[1]) if match else None
        if match and value is not None:
            own.write(match[1], msgspec.to_builtins(value))
            signed["records of attempts"] += 1

    checkpoints = Storage(store.checkpoints)
    for (step, attempt), manifest in every_manifest(checkpoints)[0].items():
        folder = remote_folder(step, attempt)
        checkpoints.put_bytes(f"{folder}/manifest.json", pack(manifest, seal, folder))
        signed["checkpoints"] += 1

    logs = Storage(store.rollouts)
    for key, _ in logs.list():
        if OBJECT.fullmatch(key):
            logs.put_bytes(key, seal.signed_archive(f"{ROLLOUTS}/{key}", logs.get_bytes(key)))
            signed["rollout logs"] += 1
    return signed


def run(arguments: list[str]) -> None:
    """The command line. Raises ConfigError, StorageError."""
    if len(arguments) != 1:
        raise ConfigError("usage: python -m trainer.checkpoint.sign BUCKET/RUN_ID")
    for what, number in sign_run(arguments[0]).items():
        print(f"{number} {what} signed")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
