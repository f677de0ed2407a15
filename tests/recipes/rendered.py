"""Task files of a recipe on a target, as `launch.py render` makes them, the commands of a launch, and a
working copy for the shell of a task."""

from __future__ import annotations

import shutil
from pathlib import Path

from recipes.drivers import task_files
from recipes.plan.resolving import resolve_groups
from recipes.platforms.base import Commands, LaunchGiven
from recipes.platforms.targets import target_named
from recipes.presets import get
from recipes.recipe.spec import Recipe, override
from recipes.records.run_record import RunRecord

ROOT = Path(__file__).parents[2]


def render(recipe: Recipe, target: str) -> dict[str, str]:
    return task_files.render(task_files.resolve_task(recipe, target))


def render_unchecked(recipe: Recipe, target: str) -> dict[str, str]:
    """Those of both groups, whether or not the target can run them."""
    return task_files.render(resolve_groups(recipe, target))


def main_file(name: str, target: str, *overrides: str) -> str:
    """Text of the file to launch."""
    return next(iter(render(override(get(name), list(overrides)), target).values()))


def launch_commands(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    return target_named(record.target).commands(record, LaunchGiven(files, env, secrets, detach))


def make_checkout(folder: Path, body: str, environment: str = "gpu", setup: str = "exit 0") -> None:
    """A working copy whose environment is a stand-in: its Python is a shell script with this body."""
    shell = folder / "trainer/shell"
    shell.mkdir(parents=True)
    for name in ("bucket.sh", "task.sh"):
        shutil.copy(ROOT / "trainer/shell" / name, shell)
    (shell / "setup.sh").write_text(f"{setup}\n")
    (shell / "driver.sh").write_text("")
    make_program(folder / f".venvs/{environment}/bin/python", body)


def make_program(path: Path, body: str) -> None:
    """A program that runs this line of shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
