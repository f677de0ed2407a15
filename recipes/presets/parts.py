"""What recipes are put together from: models, datasets and the settings that every run on a cloud shares."""

from __future__ import annotations

from dataclasses import replace

from recipes.recipe.spec import ASKED_BUCKET, Cluster, DataFacts, Step
from trainer.config import Checkpoint, Data, Logging, Model, Rewards, Run, RunConfig

VISION_MODELS = {
    "qwen2.5-vl": {size: f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct" for size in ("3b", "7b", "32b", "72b")},
    "qwen3.5": {
        "0.8b": "Qwen/Qwen3.5-0.8B",
        "4b": "Qwen/Qwen3.5-4B",
        "9b": "Qwen/Qwen3.5-9B",
        "27b": "Qwen/Qwen3.5-27B",
        "35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    },
    "qwen3-vl": {
        size: f"Qwen/Qwen3-VL-{size.upper()}-Instruct" for size in ("2b", "4b", "8b", "30b-a3b", "32b")
    },
}
IMAGE_TOKEN = {"qwen2.5-vl": 28 * 28, "qwen3-vl": 32 * 32, "qwen3.5": 32 * 32}
"""Pixels of one."""
TEXT_MODELS = {size: f"Qwen/Qwen2.5-{size.upper()}-Instruct" for size in ("0.5b", "7b", "14b", "72b")}

DATASETS = {
    "mathv60k": DataFacts(
        name="mathv60k",
        rows=60_000,
        held_out="validation",
        prompt_tokens=420,
        answer_tokens=400,
        disk_gib=8.0,
    ),
    "geometry3k": DataFacts(
        name="geometry3k", rows=2_101, prompt_tokens=360, answer_tokens=450, disk_gib=0.5
    ),
    "generated": DataFacts(
        name="generated",
        rows=20_000,
        held_out="validation",
        prompt_tokens=430,
        answer_tokens=300,
        disk_gib=1.0,
    ),
    "details": DataFacts(
        name="details",
        rows=4_000,
        held_out="validation",
        prompt_tokens=650,
        answer_tokens=600,
        disk_gib=0.5,
    ),
    "mathv60k-worked": DataFacts(
        name="mathv60k-worked",
        rows=40_000,
        held_out="train",
        prompt_tokens=420,
        answer_tokens=400,
        disk_gib=4.0,
    ),
    "alpaca": DataFacts(
        name="alpaca", rows=51_000, held_out="validation", prompt_tokens=60, answer_tokens=90, disk_gib=0.2
    ),
    "gsm8k": DataFacts(name="gsm8k", rows=7_473, prompt_tokens=160, answer_tokens=220, disk_gib=0.1),
}
"""Rows are those of the published sets; token counts are planning figures, replaced by measured ones in every
run."""

CLUSTERS = {
    "1x1": Cluster(nodes=1, gpus_per_node=1, gpu="A100-80GB", alternatives=("H100",)),
    "1x4": Cluster(nodes=1, gpus_per_node=4, gpu="A100-80GB", alternatives=("H100",)),
    "1x8": Cluster(nodes=1, gpus_per_node=8, gpu="A100-80GB", alternatives=("H100",)),
    "2x8": Cluster(nodes=2, gpus_per_node=8, gpu="H100", alternatives=("A100-80GB",)),
    "16x8": Cluster(nodes=16, gpus_per_node=8, gpu="H100"),
    "4x8": Cluster(nodes=4, gpus_per_node=8, gpu="A100-80GB", alternatives=("H100",)),
}


DRAWN = {
    "generated": ("generated", "--rows", "20500", "--difficulty", "1..5", "--seed", "0"),
    "details": ("generated", "--families", "details", "--rows", "4100", "--name", "details"),
}
"""Sets that are drawn, nearly all of them for training: see data_prep/generate."""


def prepare_step(name: str) -> Step:
    """The step that downloads (or draws), checks and converts a dataset."""
    return Step(
        creates=f"${{DATA}}/{name}/manifest.json",
        module="data_prep",
        args=("prepare", *DRAWN.get(name, (name,)), "--out", f"${{DATA}}/{name}"),
    )


def cloud_run(name: str, model: str, dataset: str) -> RunConfig:
    """A GRPO run on a cloud: identity, model, data, checkpoints in the bucket, saved at Young and Daly's
    interval."""
    return RunConfig(
        run=Run(name=name, id="${RUN_ID}", dir="${RUNS}/${RUN_ID}"),
        model=Model(path=model),
        data=Data(path=f"${{DATA}}/{dataset}"),
        rewards=Rewards(workers=8),
        checkpoint=Checkpoint(remote=ASKED_BUCKET, every_steps=0),
        logging=Logging(wandb="offline"),
    )


def with_parts(config: RunConfig, **sections: dict) -> RunConfig:
    """The configuration with some fields of some sections changed: `with_parts(c, rollout={"max_tokens":
    8000})`."""
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return replace(config, **changed)
