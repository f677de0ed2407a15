"""What recipes are put together from: models, datasets, clusters, and the settings that every run on a cloud
shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.recipe.spec import ASKED_BUCKET, Budget, Cluster, DataFacts, Recipe, Step
from trainer.config import Checkpoint, Data, Expected, Logging, Model, Rewards, Run, RunConfig

_SIZES = {
    "qwen2.5-vl": ("Qwen/Qwen2.5-VL-{}-Instruct", "3b 7b 32b 72b"),
    "qwen3.5": ("Qwen/Qwen3.5-{}", "0.8b 4b 9b 27b 35b-a3b"),
    "qwen3-vl": ("Qwen/Qwen3-VL-{}-Instruct", "2b 4b 8b 30b-a3b 32b"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", "0.5b 7b 14b 72b"),
}
MODELS = {
    family: {size: form.format(size.upper()) for size in sizes.split()}
    for family, (form, sizes) in _SIZES.items()
}
"""Models of the hub by family and size."""
IMAGE_TOKEN = {"qwen2.5-vl": 28 * 28, "qwen3-vl": 32 * 32, "qwen3.5": 32 * 32}
"""Pixels of one."""
_ROWS = (
    # name, rows, split that is held out, tokens of a prompt and of an answer, GiB on the disk
    ("mathv60k", 60_000, "validation", 420, 400, 8.0),
    ("geometry3k", 2_101, "test", 360, 450, 0.5),
    ("generated", 20_000, "validation", 430, 300, 1.0),
    ("details", 4_000, "validation", 650, 600, 0.5),
    ("mathv60k-worked", 40_000, "train", 420, 400, 4.0),
    ("alpaca", 51_000, "validation", 60, 90, 0.2),
    ("gsm8k", 7_473, "test", 160, 220, 0.1),
    ("mmk12", 15_000, "test", 420, 500, 4.0),
    ("clevr", 70_000, "validation", 250, 120, 8.0),
    ("counting", 10_000, "validation", 250, 120, 1.0),
)
"""Rows are those of the published sets; token counts are planning figures, replaced by measured ones in every
run."""
DATASETS = {
    row[0]: DataFacts(
        name=row[0], rows=row[1], held_out=row[2], prompt_tokens=row[3], answer_tokens=row[4], disk_gib=row[5]
    )
    for row in _ROWS
}
_SETS = {
    "generated": ("generated", "--rows", "20500", "--difficulty", "1..5", "--seed", "0"),
    "details": ("generated", "--families", "details", "--rows", "4100", "--name", "details"),
    "counting": ("generated", "--families", "counting", "--rows", "10200", "--name", "counting"),
}
"""Sets that are drawn, nearly all of them for training: see data_prep/generate."""
CLUSTERS = {
    "2x8": Cluster(nodes=2, gpus_per_node=8, gpu="H100", alternatives=("A100-80GB",)),
    "16x8": Cluster(nodes=16, gpus_per_node=8, gpu="H100"),
}
for _nodes, _gpus in ((1, 1), (1, 4), (1, 8), (4, 8)):
    CLUSTERS[f"{_nodes}x{_gpus}"] = Cluster(
        nodes=_nodes, gpus_per_node=_gpus, gpu="A100-80GB", alternatives=("H100",)
    )


def prepare_step(name: str) -> Step:
    """The step that downloads (or draws), checks and converts a dataset."""
    return Step(
        creates=f"${{DATA}}/{name}/manifest.json",
        module="data_prep",
        args=("prepare", *_SETS.get(name, (name,)), "--out", f"${{DATA}}/{name}"),
    )


def cloud_recipe(
    name: str,
    description: str,
    path: str,
    dataset: str,
    cluster: Cluster,
    hours: float,
    expected: Expected | None = None,
    **sections: dict[str, Any],
) -> Recipe:
    """A GRPO run on a cloud: identity, model, data, checkpoints in the bucket, saved at Young and Daly's
    interval. path: the model's. sections: fields of its configuration that are set, by section."""
    config = RunConfig(
        run=Run(name=name, id="${RUN_ID}", dir="${RUNS}/${RUN_ID}"),
        model=Model(path=path),
        data=Data(path=f"${{DATA}}/{dataset}"),
        rewards=Rewards(workers=8),
        checkpoint=Checkpoint(remote=ASKED_BUCKET, every_steps=0),
        logging=Logging(wandb="offline"),
        expected=expected or Expected(),
    )
    return Recipe(
        name=name,
        description=description,
        config=with_parts(config, **sections),
        cluster=cluster,
        dataset=DATASETS[dataset],
        steps=(prepare_step(dataset),),
        budget=Budget(max_hours=hours),
    )


def title_of(model: str) -> str:
    """A model's name as a description has it."""
    return model.partition("/")[2].removesuffix("-Instruct")


def with_parts(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with some fields of some sections changed: `with_parts(c, rollout={"max_tokens":
    8000})`."""
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return replace(config, **changed)


def changed(recipe: Recipe, name: str, description: str, **sections: dict[str, Any]) -> Recipe:
    """The recipe under another name, with some fields of some sections changed."""
    run = sections.pop("run", {}) | {"name": name}
    config = with_parts(recipe.config, run=run, **sections)
    return replace(recipe, name=name, description=description, config=config)
