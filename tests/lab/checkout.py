"""A working copy of the repository for a lab: the code linked, the environment `cpu` that of the running tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {".venvs", ".cache", "runs", ".git", "wandb"}


def make(folder: Path, copy: bool = False) -> Path:
    """Makes it. With `copy` nothing is linked but the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in ROOT.iterdir() if not copy else ():
        if entry.name not in LEFT_OUT:
            (folder / entry.name).symlink_to(entry)
    bin_dir = folder / ".venvs" / "cpu" / "bin"
    bin_dir.mkdir(parents=True)
    python = bin_dir / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (bin_dir.parent / ".pinned").touch()
    return folder


def stock(work: Path, recipe, data: Path, model: Path) -> dict[str, str]:
    """Puts data and model where the recipe's steps would, so that these find them; returns the variables for it."""
    places = {"DATA": str(work / "data"), "MODELS": str(work / "models"), "WORK": str(work), "RUNS": str(work / "runs")}
    for step, source in zip(recipe.steps, (data, model), strict=True):
        creates = step.creates.replace("${DATA}", places["DATA"]).replace("${MODELS}", places["MODELS"])
        place = Path(creates).parent
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
    return places
