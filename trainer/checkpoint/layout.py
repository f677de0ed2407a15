"""Where a run's checkpoints lie, here and in the store. Without torch: the launcher starts in a second."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from trainer.config import RunConfig
from trainer.config.run_store import RunStore
from trainer.storage.storage import Storage

MANIFEST = re.compile(r"(step-\d{8})/(?:(\d+-[0-9a-f]{6})/)?manifest\.json")
"""Key of a manifest below the run's checkpoints: (the step's folder, the attempt's or nothing)."""


CheckpointKey = tuple[int, str]
"""Step and attempt of a checkpoint; attempt "": the layout before attempts had folders."""
Counts = Callable[[int, str], bool]
"""(step, attempt) of a checkpoint -> whether it counts (trainer/checkpoint/course.py)."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint's folder, or None for any other name: `step-00000020.keep` is a person's."""
    return int(name[5:]) if re.fullmatch(r"step-\d{8}", name) else None


def remote_folder(step: int, attempt: str) -> str:
    """Folder of one attempt's checkpoint of a step, below the run's in the store. attempt "": the layout
    before 2."""
    return f"{step_name(step)}/{attempt}" if attempt else step_name(step)


def local_dir(config: RunConfig) -> Path:
    return Path(RunStore.at_run_folder(config).checkpoints)


def remote_url(config: RunConfig) -> str:
    """URL of the run's checkpoints in the object store; empty without one."""
    store = RunStore.of(config)
    return store.checkpoints if store else ""


def attempts_url(config: RunConfig) -> str:
    store = RunStore.of(config)
    return store.attempts if store else str(Path(RunStore.at_run_folder(config).attempts).absolute())


def count_every_checkpoint(step: int, attempt: str) -> bool:
    return True


def checkpoint_keys(config: RunConfig, storage: Storage | None) -> set[CheckpointKey]:
    """The checkpoints that have a manifest, here or in the store, whole or not."""
    keys = set()
    for match in filter(None, map(MANIFEST.fullmatch, dict(storage.list()) if storage else ())):
        keys.add((step_of(match[1]) or 0, match[2] or ""))
    for path in local_dir(config).glob("step-*/manifest.json"):
        # one that is being dropped, or is damaged
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            attempt = json.loads(path.read_bytes())["manifest"].get("attempt", "")
            if re.fullmatch(r"(\d+-[0-9a-f]{6})?", attempt):
                keys.add((step_of(path.parent.name) or 0, attempt))
    return keys


def newest_step(config: RunConfig, storage: Storage | None, counts: Counts = count_every_checkpoint) -> int:
    """Newest step with a checkpoint that counts, here or in the store; 0 for none."""
    return max(
        (step for step, attempt in checkpoint_keys(config, storage) if counts(step, attempt)), default=0
    )


def held_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, which may be changing or missing."""
    held = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                held += path.stat().st_size
    return held
