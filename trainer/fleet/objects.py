"""What lies in a run's folder `fleet` in the bucket, and the signature that every object carries.

    about/7-3f2c1a.json                    head, once per attempt: configuration, fingerprints, layout
    head/7-3f2c1a.json                     head, every 5 s: newest version, whether the run is over
    weights/00000021-5f0c2a9be1d40c77.json
                                           head, last: a version's parent and the patches that make it
    weights/7-3f2c1a/00000021-r00005.patch rank 5: the changes of its shard since the parent
    mail/7-3f2c1a/WORKER.json              head: the units that this worker is to sample
    workers/WORKER.json                    worker, every 5 s: what it does and what it has sent
    samples/7-3f2c1a/000041.2-WORKER.npz
                                           worker: a unit, which was given out for the second time
    refused/7-3f2c1a/000041.2-WORKER.json  head: why a unit was not trained on

Every key has one writer, so no condition, lock or listing is needed that a store would have to keep. An
object is signed together with its run and key: one that was copied to another place is refused like one of a
stranger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from trainer.config.run_store import FLEET
from trainer.storage.seal import ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.system.errors import ObjectTooLarge
from trainer.system.records import Record, decode_record

SIGNATURE_BYTES = 32
MOST_BYTES = {"workers": 1 << 20, "head": 4 << 20, "refused": 1 << 20}
"""Largest object of a kind, which is its folder."""
MOST_OTHER_BYTES = 64 << 20
"""Largest object of every other kind, but for patches and samples, whose readers know their sizes."""
WORKERS = "workers"
WEIGHTS = "weights"
SAMPLES = "samples"
MAIL = "mail"


class Objects:
    """Signed objects of one run. Raises what `Storage` does, and Forged."""

    def __init__(self, storage: Storage, seal: Seal) -> None:
        """storage: the run's folder `fleet`."""
        self.storage, self.seal = storage, seal

    def put(self, name: str, body: bytes) -> None:
        self.storage.put_bytes(name, self.seal.signature(f"{FLEET}/{name}", body) + body)

    def get(self, name: str, most_bytes: int = 0) -> bytes:
        """An object's body. most_bytes: the largest that is read; 0: what its kind may have. Raises
        FileNotFoundError, Forged."""
        most_bytes = most_bytes or MOST_BYTES.get(name.partition("/")[0], MOST_OTHER_BYTES)
        try:
            data = self.storage.get_bytes(name, SIGNATURE_BYTES + most_bytes)
        except ObjectTooLarge as error:
            raise ForgedObject(str(error)) from error
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        self.seal.check(f"{FLEET}/{name}", signature, body)
        return body

    def put_record(self, name: str, value: Any) -> None:
        self.put(name, msgspec.json.encode(value))

    def get_record(self, name: str, kind: type[Record]) -> Record | None:
        """A record of a type; None where there is no such object. Raises Forged; MalformedRecord where other
        code has written it with the run's key."""
        try:
            body = self.get(name)
        except FileNotFoundError:
            return None
        return decode_record(body, kind, name, MOST_OTHER_BYTES)


# --- keys ---------------------------------------------------------------------------------------------------


def about_key(attempt: str) -> str:
    return f"about/{attempt}.json"


def head_key(attempt: str) -> str:
    return f"head/{attempt}.json"


def version_key(version: int, lineage: str) -> str:
    """Where a version's manifest lies: its name holds what it is made of."""
    return f"{WEIGHTS}/{version:08d}-{lineage[:16]}.json"


def patch_key(attempt: str, version: int, rank: int) -> str:
    return f"{WEIGHTS}/{attempt}/{version:08d}-r{rank:05d}.patch"


def mail_key(attempt: str, worker: str) -> str:
    return f"{MAIL}/{attempt}/{worker}.json"


def worker_key(worker: str) -> str:
    return f"{WORKERS}/{worker}.json"


def samples_key(attempt: str, unit: str, turn: int, worker: str) -> str:
    """Where a worker's samples of a unit lie. turn: how often the unit had been given out by then."""
    return f"{SAMPLES}/{attempt}/{unit}.{turn}-{worker}.npz"


def refused_key(attempt: str, unit: str, turn: int, worker: str) -> str:
    return f"refused/{attempt}/{unit}.{turn}-{worker}.json"


# --- lineage ------------------------------------------------------------------------------------------------


def first_lineage(kind: str, version: int, digests: Sequence[str]) -> str:
    """The lineage of the weights that an attempt begins with: what they are, by content."""
    return hashlib.sha256("\n".join([kind, str(version), *digests]).encode()).hexdigest()


def next_lineage(parent: str, patches: Sequence[str]) -> str:
    """The lineage of a version. patches: sha256 of each rank's."""
    return hashlib.sha256("\n".join([parent, *patches]).encode()).hexdigest()
