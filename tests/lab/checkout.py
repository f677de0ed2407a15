"""A working copy of the repository for a lab: the code linked, the environment `cpu` that of the running
tests."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import hosts

from recipes.drivers.task_files import GENERATED
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from tests.recipes.rendered import render

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {".venvs", ".cache", "runs", ".git", "wandb"}


def make(folder: Path, copy: bool = False) -> Path:
    """Makes it. With `copy` nothing is linked but the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in ROOT.iterdir() if not copy else ():
        if entry.name not in LEFT_OUT:
            (folder / entry.name).symlink_to(entry)
    return environment(folder, "cpu")


def environment(folder: Path, name: str) -> Path:
    """Gives the checkout an environment, that of the running tests: a lab has no way out to fetch one."""
    bin_dir = folder / ".venvs" / name / "bin"
    bin_dir.mkdir(parents=True)
    python = bin_dir / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (bin_dir.parent / ".pinned").touch()
    return folder


def small(steps: int) -> Recipe:
    """The demo on two nodes with one rank each, short enough for a test."""
    sizes = "rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.max_tokens=16 cluster.nodes=2"
    sizes += " evaluation.every_steps=0 checkpoint.every_steps=1 checkpoint.export_hf=never"
    recipe = resolve("demo", [f"run.max_steps={steps}", *sizes.split()])
    placement = dataclasses.replace(recipe.config.placement, workers_per_node=1)
    return dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, placement=placement))


def committed_file(target: str, steps: int) -> tuple[str, str]:
    """(name, text) of the demo's committed file, but for its number of steps."""
    (path,) = (GENERATED / target).glob("demo.*")
    text = path.read_text()
    assert text.count("max_steps: 60\n") == 1
    return path.name, text.replace("max_steps: 60\n", f"max_steps: {steps}\n")


def batch(
    folder: Path, target: str, steps: int, data: Path, model: Path, as_committed: bool = False
) -> tuple[Path, dict[str, str], Path]:
    """A checkout with the batch script of `small`, or the committed one: (the script, what to set for it, the
    run's directory)."""
    recipe = resolve("demo", []) if as_committed else small(steps)
    repository = make(folder / "repository")
    env = stock(folder / "work", recipe, data, model) | hosts.SHARED
    env |= {"RUN_ID": "lab", "SPOTRL_METADATA": "off"}
    ((name, text),) = [committed_file(target, steps)] if as_committed else render(recipe, target).items()
    script = repository / ".cache" / name
    script.parent.mkdir()
    script.write_text(text)
    return script, env, folder / "work" / "runs" / "lab"


def steps_of(run: Path) -> list[int]:
    """The steps that a run has logged."""
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def committed(run: Path) -> list[int]:
    """The steps whose checkpoints are whole."""
    return sorted(int(re.search(r"/step-(\d{8})/", str(m))[1]) for m in run.rglob("step-*/manifest.json"))


def stock(work: Path, recipe: Recipe, data: Path, model: Path) -> dict[str, str]:
    """Puts data and model where the recipe's steps would, so that these find them; returns the variables for
    it."""
    places = {name: str(work / name.lower()) for name in ("DATA", "MODELS", "RUNS")} | {"WORK": str(work)}
    for step, source in zip(recipe.steps, (data, model), strict=True):
        creates = step.creates.replace("${DATA}", places["DATA"]).replace("${MODELS}", places["MODELS"])
        place = Path(creates).parent
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
    return places
