"""The whole pipeline on a laptop: a synthetic dataset, a tiny Qwen2.5-VL, GRPO over two CPU workers."""

from __future__ import annotations

from recipes.spec import Cluster, Dataset, Recipe, Step
from trainer.config import Checkpoint, Data, Model, Placement, Rollout, Run, RunConfig


def demo() -> Recipe:
    """Two CPU workers on this machine."""
    return Recipe(
        name="demo",
        description="GRPO of a tiny Qwen2.5-VL on synthetic shapes, on this machine without a GPU",
        config=RunConfig(
            run=Run(name="demo", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}", max_steps=20),
            model=Model(path="${MODELS}/demo", dtype="fp32", gradient_checkpointing=False),
            data=Data(path="${DATA}/shapes", prompt_max_tokens=512),
            rollout=Rollout(prompts_per_step=8, samples_per_prompt=4, max_tokens=64, sleep_level=0, eager=True),
            checkpoint=Checkpoint(every_steps=10, remote="${BUCKET}"),
            placement=Placement(nodes=1, workers_per_node=2, device="cpu"),
        ),
        cluster=Cluster(nodes=1, gpus_per_node=0, spot="never"),
        dataset=Dataset(name="shapes", rows=512, prompt_tokens=80, answer_tokens=40, disk_gib=0.1),
        steps=(
            Step(creates="${MODELS}/demo/config.json", module="data_prep.tiny_model", args=("--out", "${MODELS}/demo")),
            Step(
                creates="${DATA}/shapes/manifest.json",
                module="data_prep",
                args=("prepare", "shapes", "--out", "${DATA}/shapes"),
            ),
        ),
    )
