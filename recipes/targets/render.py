"""Renders a recipe for any target; `python -m recipes.targets.render` writes the committed
recipes/generated."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from recipes import capabilities
from recipes.plan.memory import with_resources
from recipes.presets import RECIPES, get
from recipes.spec import Recipe, validate
from recipes.targets import dstack, local, pbs, skypilot, slurm, ssh

GENERATED = Path(__file__).parents[1] / "generated"
BY_HAND = ("local", "slurm", "pbs", "skypilot-runpod")
LAUNCHED = ("slurm", "pbs", "skypilot", "skypilot-runpod", "skypilot-gcp", "skypilot-kubernetes", "dstack-runpod",
            "dstack-gcp", "dstack-kubernetes")  # fmt: skip
"""Targets whose files work as they stand; those over ssh need your machines' names."""


def render(recipe: Recipe, target: str) -> dict[str, str]:
    """File name -> text; the first is the one to launch. Raises ConfigError where the target cannot run the
    recipe."""
    validate(recipe)
    capabilities.check(recipe, target)
    capabilities.check_bucket(recipe, target)
    if capabilities.capability(target).shared_files and recipe.cluster.nodes > 1 and recipe.kind == "train":
        saving = replace(recipe.config.checkpoint, shared_files=True)  # so that the bucket may be left out
        recipe = replace(recipe, config=replace(recipe.config, checkpoint=saving))
    recipe = with_resources(recipe)
    match target.partition("-")[0]:
        case "skypilot":
            return skypilot.render(recipe, target)
        case "dstack":
            return dstack.render(recipe, target)
        case "slurm":
            return slurm.render(recipe)
        case "pbs":
            return pbs.render(recipe)
        case "ssh":
            return ssh.render(recipe)
        case "local":
            return local.render(recipe)
    raise AssertionError(target)


def generated() -> dict[str, str]:
    """Every file under recipes/generated: path below it -> text."""
    files = {}
    for name in RECIPES:
        recipe = get(name)
        for target in capabilities.targets_for(recipe):
            if target in (BY_HAND if name == "demo" else LAUNCHED):
                files |= {f"{target}/{file}": text for file, text in render(recipe, target).items()}
    return files


def main() -> int:
    """Writes the files and removes those that no recipe makes any more."""
    files = generated()
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
