"""Which checkpoints stay: the newest and the best, here and in the store, and never the last whole one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainer.checkpoint.find import Manifests, manifests_here, manifests_there
from trainer.checkpoint.format import step_name
from trainer.storage.storage import Storage


def kept(manifests: Manifests, last: int, best: int, safe: int) -> set[int]:
    """Steps that stay: the `last` newest of all, the `last` newest up to `safe`, and the `best` by held-out score.

    safe: newest step that the store has. What came after it does not count against what came before, so that an old
    checkpoint goes only after the new one is committed in the store, however long that is away.
    """
    scored = [m for m in manifests.values() if m["score"] is not None]
    finest = sorted(scored, key=lambda m: (m["score"], m["step"]), reverse=True)[:best]
    settled = sorted(step for step in manifests if step <= safe)
    return set(settled[-last:]) | set(sorted(manifests)[-last:]) | {m["step"] for m in finest}


def prune_local(folder: Path, last: int, best: int, safe: int, busy: Collection[int | None]) -> None:
    """Drops local checkpoints that need not stay, and what no manifest ever followed. busy: steps being worked on."""
    manifests = manifests_here(folder)
    keep, newest = kept(manifests, last, best, safe), max(manifests, default=0)
    for path in folder.glob("step-*"):
        step = int(path.name.removeprefix("step-"))
        if step not in keep and step <= newest and step not in busy:
            drop(path)


def prune_remote(storage: Storage, last: int, best: int, busy: Collection[int | None]) -> None:
    """The same in the store."""
    manifests, sizes = manifests_there(storage)
    steps: dict[int, list[str]] = {}
    for key in sizes:
        if key.startswith("step-"):
            steps.setdefault(int(key[5:13]), []).append(key)
    newest = max(manifests, default=0)
    keep = kept(manifests, last, best, newest)
    for step, keys in steps.items():
        if step not in keep and step <= newest and step not in busy:
            storage.delete([f"{step_name(step)}/manifest.json"])  # first: from here on it is no checkpoint
            storage.delete(keys)


def make_room(
    folder: Path, wanted: int, room: Callable[[], int], busy: Collection[int | None], say: Callable[[str], Any]
) -> int:
    """Drops local checkpoints but the newest, oldest first, while `wanted` bytes do not fit; returns the room.

    Where that is not enough the writers refuse, with the figures.
    """
    while (free := room()) < wanted:
        steps = [step for step in sorted(manifests_here(folder))[:-1] if step not in busy]
        if not steps:
            break
        say(f"dropping the local checkpoint of step {steps[0]} early: the disk budget needs its room")
        drop(folder / step_name(steps[0]))
    return free


def drop(folder: Path) -> None:
    """Removes one checkpoint, its manifest first."""
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
