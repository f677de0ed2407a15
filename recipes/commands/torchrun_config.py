"""`launch.py config`: the configuration of a supervised run as a file, for torchrun on your own machines."""

from __future__ import annotations

import shlex
from pathlib import Path

from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records import run_record
from trainer import config as run_config
from trainer.config import ConfigError

FOLDERS = {"RUNS": "runs", "DATA": "data", "MODELS": "models"}
"""Below the folder of the run.yaml's nodes, which is the repository's."""


def write_config_file(name: str, overrides: list[str], bucket: str, run_id: str, path: Path) -> int:
    """Writes the file and prints what to run before it and on every node. Raises ConfigError."""
    recipe = resolve(name, overrides)
    if recipe.config.method != "sft":
        raise ConfigError(f"{recipe.name} is no supervised run: torchrun starts method sft only, use `up`")
    run_id = run_record.check_run_id(run_id or run_record.new_run_id(recipe.name))
    values = {"RUN_ID": run_id, "BUCKET": bucket}
    values |= {variable: str(Path(folder).absolute()) for variable, folder in FOLDERS.items()}
    config = run_config.override(recipe.config, _filled(recipe, values))
    run_config.validate(config)
    if config.placement.nodes > 1 and not (config.checkpoint.remote or config.checkpoint.shared_files):
        raise ConfigError(
            f"{config.placement.nodes} nodes save into one place: give --bucket, or --set "
            "checkpoint.shared_files=true where all of them see this folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_config.dump(config))

    place = config.placement
    print(f"{path}: {recipe.name} as {run_id}, {place.nodes} nodes x {place.workers_per_node} ranks")
    for step in recipe.steps:
        words = ["python", "-m", step.module, *(_expanded(word, values) for word in step.args)]
        print(f"once, before it: {shlex.join(words)}")
    print(
        f"on every node, NODE_RANK counting from 0: NNODES={place.nodes} NODE_RANK=0 MASTER_ADDR=... "
        f"GPUS_PER_NODE={place.workers_per_node} bash examples/torchrun/sft.sh {path}"
    )
    return 0


def _filled(recipe: Recipe, values: dict[str, str]) -> list[str]:
    """Assignments of the fields that a launch would fill in where it runs."""
    config = recipe.config
    texts = {
        "run.id": config.run.id,
        "run.dir": config.run.dir,
        "model.path": config.model.path,
        "data.path": config.data.path,
        "evaluation.path": config.evaluation.path,
        "checkpoint.remote": config.checkpoint.remote,
    }
    return [f"{key}={_expanded(text, values)}" for key, text in texts.items() if "${" in text]


def _expanded(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    return text
