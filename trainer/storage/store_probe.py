"""Whether a store can do what a run needs of it, found out in a second before anything expensive starts.

`python -m trainer.storage probe URL [--read-only]` from the desk; the head's launcher does the same before
Ray.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from trainer.config import ConfigError
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.errors import StorageError

PATIENT = RetryPolicy(request_timeout_s=60.0)
"""On a node: waits through a passing outage."""
QUICK = RetryPolicy(
    attempts=2, first_wait_s=0.5, request_retries=1, request_retry_s=5.0, stall_s=8.0, request_timeout_s=15.0
)
"""On a user's machine: gives up early."""


def probe_store(
    url: str, *, write: bool = True, env: Mapping[str, str] = os.environ, retry: RetryPolicy = PATIENT
) -> None:
    """Puts, lists, reads and deletes one small object below `url`; with write=False only lists.

    Raises ConfigError, in one line that says what to change, for what no retry can cure (wrong key or secret,
    no such bucket, a missing right, another region, a clock that is off); StorageError for a store that stays
    away.
    """
    storage = Storage(url, env=env, retry=retry)
    if not write:
        storage.list()
        return
    key, data = (
        f"probe-{secrets.token_hex(6)}",
        b"SpotRL: whether this store can be written, read and cleared.",
    )
    storage.put_bytes(key, data)
    try:
        storage.list()
        try:
            read_back = storage.get_range(key, 8, 16)
        except FileNotFoundError as error:
            raise StorageError(f"{url} keeps nothing of what it acknowledges: {error}") from None
        if read_back != data[8:16]:
            raise ConfigError(f"{url}: the store gives back other bytes than it was given: use another one")
    finally:
        storage.delete([key])
