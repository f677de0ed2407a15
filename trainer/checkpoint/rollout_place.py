"""Where the logs of a run's steps lie, whose they are, and which of them are there."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.rollout_archive import FORMAT, SECOND_FORMAT, GradedStep, graded_of
from trainer.config.run_store import ROLLOUTS
from trainer.storage.attempt_record import attempt_number
from trainer.storage.seal import ForgedObject, Seal
from trainer.storage.storage import Storage

OBJECT = re.compile(r"step-(\d{8})/((\d+)-[0-9a-f]{6})\.npz")
"""Key of a step's log in the store: (step, attempt, its number)."""
LOCAL = re.compile(r"step-(\d{8})\.npz")


@dataclass(frozen=True)
class LogCopy:
    """One of the files that hold the log of a step."""

    epoch: int
    """Number of the attempt that sampled it."""
    key: str = ""
    """In the store; empty for the file of the run's folder."""


@dataclass(frozen=True)
class LogPlace:
    """The rollout log of one run as this process may read and write it."""

    folder: Path
    storage: Storage | None
    seal: Seal
    attempt: Attempt | None
    """The right to write for the run; None: there is none to lose."""
    about: dict[str, Any]
    """What is alike in every log of this attempt: format, run, configuration, data, code."""
    say: Callable[[str], None]

    @property
    def epoch(self) -> int:
        """Number of the attempt."""
        return self.attempt.epoch if self.attempt else 0

    @property
    def attempt_name(self) -> str:
        """What the store's objects of this attempt are named by."""
        return self.attempt.name if self.attempt else "0-000000"

    def path(self, step: int) -> Path:
        """The log of a step on this disk."""
        return self.folder / f"{step_name(step)}.npz"

    def header(self, archive: Any, step: int, needed: Collection[int] = ()) -> dict[str, Any]:
        """What a log says of itself. Raises ValueError where it is of another run, configuration, dataset or
        code; of what a checkpoint needs, configuration and dataset were compared with the checkpoint's."""
        about = json.loads(archive["about"].tobytes())
        expected = self.about | {"step": step}
        if step in needed:
            expected = {key: expected[key] for key in ("run_id", "step")}
            if about["format"] not in (FORMAT, SECOND_FORMAT):
                raise ValueError("its format is another")
        for key, value in expected.items():
            if about[key] != value:
                raise ValueError(f"its {key} is another")
        return about

    def load(self, copy: LogCopy, step: int, needed: Collection[int]) -> tuple[dict[str, Any], GradedStep]:
        """A step's log, and what it says of itself. Raises one of DAMAGED, StorageError, ConfigError."""
        source: Any = self.path(step)
        if copy.key and self.storage:
            data = self.storage.get_bytes(copy.key)
            self.seal.check_archive(f"{ROLLOUTS}/{copy.key}", data)
            source = io.BytesIO(data)
        with np.load(source, allow_pickle=False) as archive:
            about = self.header(archive, step, needed)
            return about, graded_of(about, dict(archive))

    def may_have_written(self, key: str) -> bool:
        """Whether an attempt of this run may have written an object: a stranger's, under a number that is the
        newest, would hide those of the run."""
        if not self.seal or self.attempt is None:
            return True
        name = key.rpartition("/")[2].removesuffix(".npz")
        begun = self.attempt.record.read(attempt_number(name))
        if begun is not None and begun.name == name:
            return True
        with contextlib.suppress(ForgedObject):
            self.seal.refuse(f"{ROLLOUTS}/{key}", "is of an attempt that there was not")
        return False


@dataclass
class LoggedSteps:
    """The steps whose logs this process has seen, read or written."""

    say: Callable[[str], None]
    durable: set[int] = field(default_factory=set)
    """Those whose log lies on this disk or in the store."""
    stored: set[int] = field(default_factory=set)
    """Those whose log lies in the store."""
    unwritten: dict[int, str] = field(default_factory=dict)
    """Those whose log could not be written, and why."""
    sampled_by: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Epoch and attempt that sampled a step which this one replays."""
    failures: int = 0

    def failed(self, error: object) -> None:
        """Tells and counts what a log could not do; the run goes on."""
        self.failures += 1
        self.say(str(error))


def log_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The logs on this disk: (step, file)."""
    for path in folder.glob("step-*.npz"):
        match = LOCAL.fullmatch(path.name)
        if match is not None:
            yield int(match[1]), path


def log_objects(storage: Storage | None) -> Iterator[tuple[int, int, str]]:
    """The logs in the store: (step, number of the attempt that sampled it, key)."""
    if storage is None:
        return
    for key, _ in storage.list():
        match = OBJECT.fullmatch(key)
        if match is not None:
            yield int(match[1]), int(match[3]), key
