"""`launch.py render`: the task files of a recipe, printed or written to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.drivers import uploads
from recipes.drivers.task_files import render, resolve_task
from recipes.plan import choice
from recipes.platforms.targets import targets_for
from recipes.presets import own_data, resolve


def write_task_files(name: str, target: str | None, overrides: list[str], out: Path | None) -> int:
    """Writes or prints the files. Returns the exit code."""
    recipe = resolve(name, overrides)
    if not target:
        target = choice.cheapest_target(recipe)
        print(f"for {target}, the cheapest of {', '.join(targets_for(recipe))}", file=sys.stderr)
    own_data.check_there(recipe)
    recipe = uploads.with_uploads(recipe, target, {})
    files = render(resolve_task(recipe, target))
    for line in uploads.upload_lines(recipe):
        print(
            f"`python3 launch.py up` would upload {line}: do so before you launch this file", file=sys.stderr
        )
    for file, text in files.items():
        if out:
            path = out / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path)
        else:
            print(f"# --- {file}\n{text}" if len(files) > 1 else text, end="")
    return 0
