"""Which checkpoints stay: the newest and the best, here and in the store, and never the last whole one.

Only what this run wrote is ever dropped: folders named `step-` and eight digits, without another run's
manifest, and in the store the objects of a checkpoint there. Whatever else lies beside them is a person's.
"""

from __future__ import annotations

import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import step_name, step_of
from trainer.checkpoint.manifest import Manifests, manifests_here, manifests_there
from trainer.storage.storage import Storage


@dataclass(frozen=True)
class Keep:
    """How many checkpoints stay, by what they are."""

    last: int
    """Newest ones."""
    best: int
    """Best ones by held-out score."""
    good: int = 0
    """Newest ones from before the trouble, while there is any."""
    trouble: int = 0
    """Step of the first alarm of a guard that lasts; 0: there is none."""

    def sound(self, steps: Iterable[int]) -> set[int]:
        """The steps from before the trouble that stay; none while there is no trouble."""
        if not self.good:
            return set()
        before = sorted(step for step in steps if step < self.trouble)
        return set(before[-self.good :])


def kept(manifests: Manifests, keep: Keep, safe: int) -> set[int]:
    """Steps that stay: the `last` newest of all, the `last` newest up to `safe`, the `best` by held-out
    score, and those from before the trouble.

    safe: newest step that the store has. What came after it does not count against what came before, so that
    an old checkpoint goes only after the new one is committed in the store, however long that is away.
    """
    steps = sorted(manifests)
    settled = steps[: bisect_right(steps, safe)]
    newest = set(steps[-keep.last :]) | set(settled[-keep.last :])

    scored = []
    for manifest in manifests.values():
        if manifest["score"] is not None:
            scored.append((manifest["score"], manifest["step"]))
    best = sorted(scored, reverse=True)[: keep.best]
    return newest | {step for _, step in best} | keep.sound(steps)


OBJECT = re.compile(r"(step-\d{8})/(?:(\d+-[0-9a-f]{6})/)?[A-Za-z0-9_.-]+")
"""Key of an object of a checkpoint."""


def prune_local(run_id: str, folder: Path, wanted: Keep, safe: int, busy: Collection[int | None]) -> None:
    """Drops local checkpoints that need not stay, and what no manifest ever followed. busy: steps being
    worked on."""
    manifests = manifests_here(folder)
    mine = _of_run(run_id, manifests)
    theirs = manifests.keys() - mine.keys()
    keep = kept(mine, wanted, safe) | theirs
    newest = max(mine, default=0)
    for path in folder.glob("step-*"):
        step = step_of(path.name)
        if step is not None and step not in keep and step <= newest and step not in busy:
            drop(path)


def _of_run(run_id: str, manifests: Manifests) -> Manifests:
    """The checkpoints of one run."""
    return {step: manifest for step, manifest in manifests.items() if manifest["run_id"] == run_id}


def prune_remote(
    run_id: str,
    storage: Storage,
    wanted: Keep,
    busy: Collection[int | None],
    check: Callable[[], None],
) -> None:
    """The same in the store: of a step that stays, what other attempts left of it goes too.

    check: raises if this attempt may no longer delete; called before every step's deletion.
    """
    manifests, sizes = manifests_there(storage)
    mine = _of_run(run_id, manifests)
    newest = max(mine, default=0)
    keep = kept(mine, wanted, newest)

    folders: dict[tuple[int, str], list[str]] = {}
    for match in filter(None, map(OBJECT.fullmatch, sizes)):
        folder = (step_of(match[1]) or 0, match[2] or "")
        folders.setdefault(folder, []).append(match[0])
    for (step, attempt), keys in folders.items():
        theirs = step in manifests and step not in mine
        stays = step in keep and attempt == mine[step].get("attempt", "")
        if not stays and not theirs and step <= newest and step not in busy:
            check()
            # The manifest goes first: from then on it is no checkpoint.
            storage.delete([key for key in keys if key.endswith("/manifest.json")])
            storage.delete(keys)


def make_room(
    folder: Path,
    wanted: int,
    room: Callable[[], int],
    busy: Collection[int | None],
    say: Callable[[str], Any],
    spared: Collection[int] = (),
) -> int:
    """Drops local checkpoints but the newest, oldest first and those in `spared` last, while `wanted` bytes
    do not fit; returns the room.

    Where that is not enough the writers refuse, with the figures.
    """
    free = room()
    while free < wanted:
        older = sorted(manifests_here(folder))[:-1]
        idle = [step for step in older if step not in busy]
        if not idle:
            break
        oldest = min(idle, key=lambda step: (step in spared, step))
        say(f"dropping the local checkpoint of step {oldest} early: the disk budget needs its room")
        drop(folder / step_name(oldest))
        free = room()
    return free


def drop(folder: Path) -> None:
    """Removes one checkpoint, its manifest first."""
    (folder / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
