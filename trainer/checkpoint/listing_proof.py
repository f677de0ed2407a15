"""Whether what a store lists can be all that it holds: a start that believed an empty list would train from
step 0 over the checkpoints of the run, and prune them.

The proof is asked for by key, which a store answers truly where its listing lags or lies: the checkpoints
that the newest attempt counted when it started, and those that it will have made since.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.checkpoint.layout import CheckpointKey, remote_folder, remote_url
from trainer.config import RunConfig
from trainer.storage.attempt_record import AttemptRecord, StartRecord
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

NEXT_SAVES = 3
"""Saves behind the newest listed one that are asked for at every start."""
HIDDEN_SAVES = 64
"""The same where nothing is listed of an attempt that had begun to save."""


def check_listing(config: RunConfig, record: AttemptRecord, newest: int, committed: int) -> None:
    """Raises StorageError where the store keeps a checkpoint that counts and is newer than all that it lists.

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
    origin = record.origin(begun.epoch)
    if origin is None:
        return  # it has saved nothing of its own
    # Saves come every so many steps, or by the time they take, the first of those right behind the origin.
    every = config.checkpoint.every_steps or 1
    saves = HIDDEN_SAVES if committed <= origin.step else NEXT_SAVES
    first = max(origin.step, committed) // every + 1
    for number in range(first, first + saves):
        yield number * every, begun.name
