"""A path of a folder and a name that somebody else wrote: a record, a bucket, a manifest."""

from __future__ import annotations

from pathlib import Path


def inside(folder: str | Path, name: object) -> Path | None:
    """`folder / name` where the file is below the folder with every link followed; None for a name that leads
    elsewhere, or that no file can have.

    Every place that joins a path with a word that was read from a record or a store goes through here.
    """
    if not isinstance(name, str) or not name.strip("./") or name.startswith("/"):
        return None
    folder = Path(folder)
    try:
        root = folder.resolve()
        target = (root / name).resolve()
        target.exists()  # raises where the system takes no such name
    except (OSError, ValueError, RuntimeError):
        return None
    return folder / name if ".." not in Path(name).parts and target.is_relative_to(root) else None
