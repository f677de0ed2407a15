"""The signature of a run's objects, by the key that its trainer and workers share (SPOTRL_FLEET_KEY).

Of a run with workers everything in the bucket that decides what is trained is signed: the record of attempts,
manifests of checkpoints, which hold the sha256 of every file, rollout logs, and all below `fleet`. An object
is signed together with its run and its place below the run: one that was copied elsewhere is refused like a
stranger's.

JSON data carry the signature as a field, archives as the comment of their zip file. So who has no key, such
as a desk, reads them like those of any run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from trainer.config import ConfigError, RunConfig

KEY_VARIABLE = "SPOTRL_FLEET_KEY"
"""Names the environment variable with the run's secret, which trainer and workers share."""
LEAST_KEY = 16
FIELD = "signature"
COMMENT = b"spotrl-hmac-sha256:"
COMMENT_BYTES = len(COMMENT) + 64


class ForgedObject(ValueError):
    """An object that was not written with the run's key, or not for this place."""


def read_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """The run's secret. Raises ConfigError where there is none, or one that could be guessed."""
    key = env.get(KEY_VARIABLE, "")
    if len(key) < LEAST_KEY:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters: give trainer and workers one secret of at least"
            f" {LEAST_KEY} (openssl rand -hex 32), by which they know each other's objects"
        )
    return key.encode()


class Seal:
    """Signs and checks objects of one run. False where the run has no key: then it changes nothing and
    refuses nothing."""

    def __init__(self, run_id: str, key: bytes) -> None:
        self.run_id = run_id
        self._key = key
        self.refused: set[str] = set()

    @classmethod
    def of(cls, config: RunConfig) -> Seal:
        """That of a run, one for each process. Raises ConfigError for a run with workers and without a
        key."""
        return OPEN if config.fleet.workers == "off" else _of_run(config.run_id, read_secret())

    @classmethod
    def of_environment(cls, run_id: str) -> Seal:
        """The same for a program that has not read the run's configuration: a machine is given the key where
        its run has one."""
        return _of_run(run_id, read_secret()) if os.environ.get(KEY_VARIABLE) else OPEN

    def __bool__(self) -> bool:
        return bool(self._key)

    def signature(self, place: str, body: bytes) -> bytes:
        """HMAC-SHA256 of an object. place: its key below the run."""
        signed = hmac.new(self._key, f"{len(self.run_id)}:{self.run_id}/{place}\0".encode(), hashlib.sha256)
        signed.update(body)
        return signed.digest()

    def refuse(self, place: str, why: str) -> NoReturn:
        """Counts and tells an object, once. Raises ForgedObject."""
        message = f"{place} of run {self.run_id} {why}"
        if place not in self.refused:
            self.refused.add(place)
            print(f"signature: {message}: it is not used", file=sys.stderr, flush=True)
        raise ForgedObject(message)

    def check(self, place: str, carried: bytes, body: bytes) -> None:
        """carried: the signature that an object carries; empty for none. Raises ForgedObject."""
        if not carried:
            self.refuse(place, f"is not signed, and the run has a key ({KEY_VARIABLE})")
        if not hmac.compare_digest(carried, self.signature(place, body)):
            self.refuse(place, "was not written with this run's key, or for another place")

    def signed_json(self, place: str, value: dict[str, Any]) -> dict[str, Any]:
        if not self:
            return value
        body = _without_signature(value)
        return body | {FIELD: self.signature(place, _text(body)).hex()}

    def check_json(self, place: str, value: Any) -> None:
        """Raises ForgedObject for JSON data that are not signed, or not for this place."""
        if not self:
            return
        value = value if isinstance(value, dict) else {}
        carried = value.get(FIELD, "")
        self.check(
            place, _bytes(carried) if isinstance(carried, str) else b"", _text(_without_signature(value))
        )

    def signed_archive(self, place: str, data: bytes) -> bytes:
        if not self:
            return data
        body, _ = _archive_parts(data)
        comment = COMMENT + self.signature(place, body).hex().encode()
        return body[:-2] + len(comment).to_bytes(2, "little") + comment

    def check_archive(self, place: str, data: bytes) -> None:
        """Raises ForgedObject for a zip archive that is not signed, or not for this place."""
        if self:
            body, carried = _archive_parts(data)
            self.check(place, carried, body)


OPEN = Seal("", b"")
"""That of a run without a key."""


@lru_cache
def _of_run(run_id: str, key: bytes) -> Seal:
    return Seal(run_id, key)


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _without_signature(value: dict[str, Any]) -> dict[str, Any]:
    return {name: field for name, field in value.items() if name != FIELD}


def _archive_parts(data: bytes) -> tuple[bytes, bytes]:
    """A zip archive as NumPy writes it, which ends with the length 0 of its comment, and its signature; the
    archive itself and nothing where it is not signed."""
    comment = data[-COMMENT_BYTES:]
    if not comment.startswith(COMMENT):
        return data, b""
    return data[: -COMMENT_BYTES - 2] + b"\0\0", _bytes(comment[len(COMMENT) :].decode(errors="replace"))


def _bytes(text: str) -> bytes:
    """A signature's bytes; of what is none, bytes that are no signature."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b"\0"
