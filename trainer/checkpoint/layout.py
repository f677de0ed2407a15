"""Where a run's checkpoints lie, here and in the store. Without torch: the launcher starts in a second."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from trainer.config import RunConfig
from trainer.config.run_store import RunStore
from trainer.storage.storage import Storage

MANIFEST = re.compile(r"(step-\d{8})/(?:(\d+-[0-9a-f]{6})/)?manifest\.json")
"""Key of a manifest below the run's checkpoints: (the step's folder, the attempt's or nothing)."""


def step_name(step: int) -> str:
    """Folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint's folder, or None for any other name: `step-00000020.keep` is a person's."""
    return int(name[5:]) if re.fullmatch(r"step-\d{8}", name) else None


def remote_folder(step: int, attempt: str) -> str:
    """Folder of one attempt's checkpoint of a step, below the run's in the store. attempt "": the layout
    before 2."""
    return f"{step_name(step)}/{attempt}" if attempt else step_name(step)


def local_dir(config: RunConfig) -> Path:
    """Local folder of the run's checkpoints."""
    return Path(RunStore.here(config).checkpoints)


def remote_url(config: RunConfig) -> str:
    """URL of the run's checkpoints in the object store; empty without one."""
    store = RunStore.of(config)
    return store.checkpoints if store else ""


def newest_step(config: RunConfig, storage: Storage | None) -> int:
    """Newest step that has a manifest, here or in the store; 0 for none. Reads no file."""
    keys = list(dict(storage.list())) if storage else []
    for path in local_dir(config).glob("step-*/manifest.json"):
        keys.append(f"{path.parent.name}/{path.name}")

    newest = 0
    for match in filter(None, map(MANIFEST.fullmatch, keys)):
        newest = max(newest, step_of(match[1]) or 0)
    return newest


def held_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, which may be changing or missing."""
    held = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                held += path.stat().st_size
    return held
