"""What the commands of launch.py do; each returns an exit code."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from recipes import run_record
from recipes.presets import RECIPES, get
from recipes.spec import Recipe, override, validate
from trainer.config import ConfigError


def resolve(name: str, overrides: list[str]) -> Recipe:
    """The recipe of that name with its overrides, validated."""
    recipe = override(get(name), overrides)
    validate(recipe)
    return recipe


def list_recipes() -> int:
    """A table of all recipes."""
    for name in RECIPES:
        recipe = get(name)
        print(f"{name:36s} {recipe.description}")
    return 0


def delegate(args: argparse.Namespace) -> int:
    """Commands that need the training environment: data, report, test."""
    environment = "test" if args.command == "test" else "cpu"
    code = subprocess.run(["bash", "trainer/setup.sh", environment]).returncode
    if code:
        return code
    python = f".venvs/{environment}/bin/python"
    match args.command:
        case "data":
            command = [python, "-m", "data_prep", *args.arguments]
        case "report":
            command = [python, "-m", "trainer.report", str(run_directory(args.run))]
        case _:
            command = [python, "-m", "pytest", *args.arguments]
    return subprocess.run(command).returncode


def run_directory(run: str) -> Path:
    """A run's directory by its id or its path. Raises ConfigError."""
    for path in (Path(run), run_record.RUNS / run):
        if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
            return path
    raise ConfigError(f"no run at {run}: give the id or the directory of a run (one with a metrics.jsonl)")


def up(name: str, target: str | None, args: argparse.Namespace) -> int:
    """Starts a recipe on a target."""
    from recipes import launching

    return launching.up(resolve(name, args.set), target, args)
