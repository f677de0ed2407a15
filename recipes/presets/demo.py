"""The whole pipeline on a laptop: a synthetic dataset, a tiny Qwen2.5-VL, GRPO over two CPU ranks.

The settings are those of benchmarks/learning.py: held-out accuracy about doubles within 60 steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from recipes.presets.models_and_data import with_parts
from recipes.recipe.spec import ASKED_BUCKET, Cluster, DataFacts, Recipe, Step
from trainer.config import (
    Algorithm,
    Checkpoint,
    Data,
    Evaluation,
    Expected,
    Model,
    Optimizer,
    Placement,
    Rollout,
    Run,
    RunConfig,
    from_dict,
)

ROOT = Path(__file__).parent.parent.parent
BANDS = Path(__file__).with_name("demo_bands.yaml")
STAGES = """\
The demo has three stages. On two quiet cores all of them take about 5 minutes:
  1. environment: once, 4 GB to download, 7 GB of disk; 1 to 5 minutes, seconds the next time
  2. warm-up: a tiny model learns the form of answers; once, 1 to 2 minutes
  3. GRPO: 60 steps, about 2 minutes; the live display begins here"""
"""What a person waits for, said before it begins."""
SHAPES = ("examples/demo/shapes.py",)
WARM_START = (*SHAPES, "examples/demo/tiny_model.py", "trainer/loops/sft.py", "examples/demo/warm_start.py")

ARITHMETIC = ("examples/pretrained/arithmetic.py",)
SMOLLM2 = ("examples/pretrained/smollm2.py", "examples/pretrained/requirements.txt")


@cache
def source_key(sources: tuple[str, ...]) -> str:
    """Eight digits that change with the code that makes a cached thing, so that a stale one is never taken
    for it."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update((ROOT / source).read_bytes())
    return digest.hexdigest()[:8]


def demo() -> Recipe:
    """Two CPU ranks on this machine, held against runs of three seeds."""
    recipe = _without_promises()
    expected = from_dict(Expected, yaml.safe_load(BANDS.read_text()))
    return replace(recipe, config=replace(recipe.config, expected=expected))


def _without_promises() -> Recipe:
    data, model = f"${{DATA}}/shapes-{source_key(SHAPES)}", f"${{MODELS}}/demo-{source_key(WARM_START)}"
    return Recipe(
        name="demo",
        description="GRPO of a tiny Qwen2.5-VL on synthetic shapes, on this machine without a GPU",
        config=RunConfig(
            run=Run(name="demo", id="${RUN_ID}", dir="${RUNS}/${RUN_ID}", max_steps=60),
            model=Model(path=model, dtype="fp32", gradient_checkpointing=False, min_pixels=28 * 28),
            data=Data(path=data, prompt_max_tokens=512, image_cache_gib=0.1),
            rollout=Rollout(
                prompts_per_step=32,
                samples_per_prompt=8,
                max_tokens=32,
                kv_cache_gib=0.5,
                sleep_level=0,
                eager=True,
            ),
            algorithm=Algorithm(kl_coef=0.02),
            optimizer=Optimizer(learning_rate=3e-4, warmup_steps=5, schedule="linear"),
            evaluation=Evaluation(every_steps=10, max_samples=128, temperature=1.0, samples_per_prompt=4),
            checkpoint=Checkpoint(every_steps=5, remote=ASKED_BUCKET),
            placement=Placement(nodes=1, workers_per_node=2, device="cpu"),
        ),
        cluster=Cluster(nodes=1, gpus_per_node=0, cpus=4, spot="never"),
        dataset=DataFacts(name="shapes", rows=2048, prompt_tokens=45, answer_tokens=17, disk_gib=0.1),
        steps=(
            Step(creates=f"{data}/manifest.json", module="examples.demo.shapes", args=("--out", data)),
            Step(
                creates=f"{model}/config.json",
                module="examples.demo.warm_start",
                args=("--data", data, "--out", model),
            ),
        ),
    )


def pretrained() -> Recipe:
    """A real pretrained model, of 135 million parameters, on arithmetic; rewards alone."""
    data, model = (
        f"${{DATA}}/arithmetic-{source_key(ARITHMETIC)}",
        f"${{MODELS}}/smollm2-{source_key(SMOLLM2)}",
    )
    recipe = _without_promises()
    config = with_parts(
        recipe.config,
        run={"name": "demo-pretrained", "max_steps": 16},
        model={"path": model},
        data={"path": data, "prompt_max_tokens": 128},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens": 12},
        algorithm={"kl_coef": 0.0},
        optimizer={"learning_rate": 2e-5, "warmup_steps": 2},
        rewards={"answer": "whole", "format_weight": 0.0},
        evaluation={"every_steps": 4, "max_samples": 48, "samples_per_prompt": 2},
        checkpoint={"every_steps": 8},
        placement={"workers_per_node": 1, "threads_per_worker": 2},
    )
    return replace(
        recipe,
        name="demo-pretrained",
        description="GRPO of SmolLM2-135M-Instruct on multiplication, on this machine without a GPU",
        config=config,
        dataset=DataFacts(name="arithmetic", rows=94, prompt_tokens=53, answer_tokens=11, disk_gib=0.1),
        steps=(
            Step(
                creates=f"{data}/manifest.json",
                module="examples.pretrained.arithmetic",
                args=("--out", data),
            ),
            Step(
                creates=f"{model}/config.json",
                module="examples.pretrained.smollm2",
                args=("--out", model),
            ),
        ),
        targets=("local",),
    )


def sft_lora() -> Recipe:
    """The same model and images: an adapter learns the right results from worked solutions; the rest stays
    frozen."""
    optimizer = {"learning_rate": 1e-2, "schedule": "cosine", "floor": 0.1, "zero_stage": 2}
    return _by_adapter(_without_promises(), "the demo's model", optimizer, max_steps=40)


def pretrained_sft_lora() -> Recipe:
    """The pretrained model learns the equations themselves."""
    optimizer = {"learning_rate": 2e-3, "schedule": "cosine", "floor": 0.1, "zero_stage": 2}
    recipe = _by_adapter(pretrained(), "SmolLM2-135M-Instruct", optimizer, max_steps=20)
    return replace(recipe, config=with_parts(recipe.config, sft={"batch_size": 16, "epochs": 4}))


def _by_adapter(recipe: Recipe, title: str, optimizer: dict[str, Any], max_steps: int) -> Recipe:
    """A recipe whose rows have solutions as supervised fine-tuning of an adapter."""
    name = f"{recipe.name}-sft-lora"
    config = with_parts(
        recipe.config,
        run={"name": name, "max_steps": max_steps},
        lora={"rank": 16},
        optimizer=optimizer,
        sft={"batch_size": 64, "epochs": 2, "max_tokens": 512},
        evaluation={"every_steps": 10, "max_samples": 128},
    )
    return replace(
        recipe,
        name=name,
        description=f"SFT of {title} with a LoRA adapter under ZeRO-2, on this machine without a GPU",
        config=replace(config, method="sft"),
        targets=("local",),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "demo-sft-lora": sft_lora,
    "demo-pretrained": pretrained,
    "demo-pretrained-sft-lora": pretrained_sft_lora,
}
