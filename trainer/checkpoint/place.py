"""Where a run's checkpoints lie, by what right they are changed, and how far they have come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.course import CheckpointCourse
from trainer.checkpoint.layout import local_dir
from trainer.config import RunConfig
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage


@dataclass(frozen=True)
class CheckpointPlace:
    """The checkpoints of one run as this process may change them."""

    config: RunConfig
    storage: Storage | None
    """None: they are on this disk alone."""
    attempt: Attempt | None
    """The right to write for the run; None: there is none to lose (reading, tests of one writer)."""
    course: CheckpointCourse
    say: Callable[[str], None]

    @property
    def folder(self) -> Path:
        """Where they lie on this disk."""
        return local_dir(self.config)

    @property
    def seal(self) -> Seal:
        """What manifests in the store are signed with."""
        return Seal.of(self.config)

    def check(self) -> None:
        """Raises AttemptFenced where a newer attempt has started."""
        if self.attempt:
            self.attempt.check()


@dataclass
class CheckpointProgress:
    """The step of each checkpoint that is on its way, and of the newest that has arrived."""

    has_store: bool
    writing: int | None = None
    """Step that the ranks are writing."""
    uploading: int | None = None
    """Step that the ranks are uploading (or will, once it is written)."""
    committed: int | None = None
    """Newest step that a resume on this disk finds."""
    stored: int = 0
    """Newest step that this run knows to be committed in the store."""
    resumed_from: int = 0
    """Step of the checkpoint that the run goes on from; 0: there is none."""

    @property
    def busy(self) -> set[int | None]:
        """Steps that are being worked on."""
        return {self.writing, self.uploading}

    @property
    def safe(self) -> int:
        """Newest step that is committed where it has to be: in the store, or on the disk without one."""
        return self.stored if self.has_store else self.committed or 0
