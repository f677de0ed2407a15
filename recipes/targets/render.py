"""Renders a recipe for any target; `python -m recipes.targets.render` writes recipes/generated, the committed
files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from recipes import capabilities
from recipes.plan.memory import with_resources
from recipes.presets import get
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe, validate
from recipes.targets import dstack, kubernetes, local, options, pbs, skypilot, slurm, ssh
from trainer.config import ConfigError

GENERATED = Path(__file__).parents[1] / "generated"
EVERYWHERE = (
    "slurm",
    "pbs",
    "skypilot",
    "skypilot-runpod",
    "skypilot-gcp",
    "skypilot-kubernetes",
    "dstack-runpod",
    "dstack-gcp",
    "dstack-kubernetes",
    "kubernetes",
)
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


def render(recipe: Recipe, target: str) -> dict[str, str]:
    """File name -> text; the first is the one to launch. Raises ConfigError where the target cannot run the
    recipe."""
    validate(recipe)
    capabilities.check_target(recipe, target)
    options.check_options(recipe, target)
    if recipe.kind == "sample":
        capabilities.check_bucket(recipe, target)
        return _of_group(recipe, target)
    if recipe.sample and (why := sample_group.nothing_to_sample(recipe)):
        raise ConfigError(why)
    return of_groups(recipe, target)


def of_groups(recipe: Recipe, target: str) -> dict[str, str]:
    """The files of both groups of machines, those of the run first. A group is a job of its own: a SkyPilot
    job group would keep both in one place and wait for all of them."""
    capabilities.check_bucket(recipe, target)
    if capabilities.capability(target).shared_files and recipe.cluster.nodes > 1 and recipe.saves:
        saving = replace(recipe.config.checkpoint, shared_files=True)  # so that the bucket may be left out
        recipe = replace(recipe, config=replace(recipe.config, checkpoint=saving))
    files = _of_group(recipe, target)
    if (sampling := sample_group.sampling_machines(recipe)) and recipe.sample:
        there = recipe.sample.target or target
        capabilities.check_bucket(sampling, there)
        files |= _of_group(sampling, there)
    return files


def _of_group(recipe: Recipe, target: str) -> dict[str, str]:
    recipe = with_resources(recipe)
    match target.partition("-")[0]:
        case "skypilot":
            return skypilot.render(recipe, target)
        case "dstack":
            return dstack.render(recipe, target)
        case "kubernetes":
            return kubernetes.render(recipe, target)
        case "slurm":
            return slurm.render(recipe)
        case "pbs":
            return pbs.render(recipe)
        case "ssh":
            return ssh.render(recipe)
        case "local":
            return local.render(recipe)
    raise AssertionError(target)


def committed() -> dict[str, str]:
    """Every file under recipes/generated: path below it -> text."""
    files = {}
    for name, targets in COMMITTED.items():
        recipe = get(name)
        can_run = capabilities.targets_for(recipe)
        for target in targets:
            if target in can_run:
                files |= {f"{target}/{file}": text for file, text in render(recipe, target).items()}
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
