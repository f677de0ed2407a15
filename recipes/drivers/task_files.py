"""The task files of a recipe for any target; `python -m recipes.drivers.task_files` writes recipes/generated,
the committed ones."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.plan.resolving import resolve_target
from recipes.platforms.targets import check_options, target_named, targets_for
from recipes.presets import get
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe

GENERATED = Path(__file__).parents[1] / "generated"
EVERYWHERE = (
    "slurm", "pbs", "skypilot", "skypilot-runpod", "skypilot-gcp", "skypilot-kubernetes", "dstack-runpod",
    "dstack-gcp", "dstack-kubernetes", "kubernetes",
)  # fmt: skip
"""Targets whose files work as they stand; those over ssh need your machines' names."""
COMMITTED = {
    "demo": ("local", "slurm", "pbs", "skypilot-runpod"),
    "grpo-qwen2.5-vl-7b-mathv60k": EVERYWHERE,
    "grpo-qwen2.5-vl-72b-mathv60k": EVERYWHERE,
    "grpo-qwen2.5-vl-7b-lora-mathv60k": EVERYWHERE,
    "sft-qwen2.5-14b-full": EVERYWHERE,
    "preflight": EVERYWHERE,
    "gpu-check": EVERYWHERE,
}
"""Recipe -> targets for which its files are committed, if they can run it. `launch.py render` writes all
others."""


def resolve_task(recipe: Recipe, target: str) -> ResolvedRecipe:
    """The recipe on a target that obeys all of its options. Raises ConfigError with the targets that do."""
    run = resolve_target(recipe, target)
    check_options(recipe, target)
    return run


def render(run: ResolvedRecipe) -> dict[str, str]:
    """File name -> text of both groups of machines, those of the run first; the first is the one to launch.
    Raises ConfigError for a bucket that goes with the machines, and what a platform does not take."""
    files = {}
    for group in run.groups:
        platform = target_named(group.target)
        platform.check_bucket(group.recipe)
        files |= platform.render(group)
    return files


def committed() -> dict[str, str]:
    """Every file under recipes/generated: path below it -> text."""
    files = {}
    for name, targets in COMMITTED.items():
        recipe = get(name)
        can_run = targets_for(recipe)
        for target in targets:
            if target in can_run:
                files |= {
                    f"{target}/{file}": text for file, text in render(resolve_task(recipe, target)).items()
                }
    return files


def main() -> int:
    """Writes the committed files and removes all others from the folder."""
    files = committed()
    for path in GENERATED.rglob("*"):
        if path.is_file() and path.relative_to(GENERATED).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(files)} files under {GENERATED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
