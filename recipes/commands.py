"""What the commands of launch.py do; each returns an exit code."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from recipes import run_record
from recipes.presets import get
from recipes.spec import Recipe, override, validate
from trainer.config import ConfigError


def resolve(name: str, overrides: list[str]) -> Recipe:
    """The recipe of that name with its overrides, validated."""
    recipe = override(get(name), overrides)
    validate(recipe)
    return recipe


def list_recipes() -> int:
    """A table of all recipes."""
    from rich.console import Console

    from recipes import shown

    shown.recipes(Console())
    return 0


def plan(name: str, target: str | None, overrides: list[str]) -> int:
    """Memory, disk, time and dollars of a recipe. Exit code 2 where it does not fit."""
    from rich.console import Console

    from recipes import shown
    from recipes.plan import cost, memory, prices
    from recipes.targets import capabilities

    recipe = resolve(name, overrides)
    if target:
        capabilities.check(recipe, target)
    offers = cost.offers(recipe, prices.sky_catalogs(), [target] if target else None)
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    shown.plan(recipe, offers, console)
    need = memory.plan(recipe)
    return 0 if need is None or need.fits else 2


def render(name: str, target: str | None, overrides: list[str], out: str) -> int:
    """Writes or prints the task files of a recipe."""
    from recipes.targets.capabilities import targets_for
    from recipes.targets.render import render as render_files

    recipe = resolve(name, overrides)
    if not target:
        raise ConfigError(f"name a target with --target: {recipe.name} runs on {', '.join(targets_for(recipe))}")
    files = render_files(recipe, target)
    for file, text in files.items():
        if out:
            path = Path(out) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path)
        else:
            print(f"# --- {file}\n{text}" if len(files) > 1 else text, end="")
    return 0


def up(name: str, target: str | None, args: argparse.Namespace) -> int:
    """Starts a recipe on a target."""
    from recipes import launching

    overrides = list(args.set)
    if args.hosts:
        overrides.append(f"site.hosts=[{args.hosts}]")
        target = target or "ssh"
    if args.bucket:
        overrides.append(f"storage.bucket={args.bucket}")
    return launching.up(resolve(name, overrides), target, args.run_id, overrides, args)


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
