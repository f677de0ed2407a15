"""What can be wrong with a checkpoint, and how often it may be."""

from __future__ import annotations

from collections.abc import Callable

from trainer.system.errors import StorageError

MAX_FAILURES = 3
"""Checkpoints that may fail in a row before the run stops: it would continue unprotected."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message says what to change, where something can be changed."""


class CorruptCheckpoint(CheckpointError):
    """A file of a committed checkpoint is missing or has another sha256: fall back to the checkpoint before
    it."""


class CheckpointFailures:
    """Checkpoints of this process that failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.total = 0
        self.in_a_row = 0

    def count(self, error: object) -> None:
        """Tells and counts one. Raises StorageError after MAX_FAILURES in a row."""
        self.total += 1
        self.in_a_row += 1
        self._say(f"{error} ({self.in_a_row} in a row)")
        if self.in_a_row >= MAX_FAILURES:
            raise StorageError(f"{self.in_a_row} checkpoints in a row failed, the last with: {error}")
