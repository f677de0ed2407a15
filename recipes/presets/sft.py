"""Supervised fine-tuning of Qwen2.5 and Qwen2.5-VL: adapters on one GPU to all weights of 72B on 16 nodes."""

from __future__ import annotations

from dataclasses import replace

from recipes.presets.parts import (
    CLUSTERS,
    DATASETS,
    TEXT_MODELS,
    VISION_MODELS,
    cloud_run,
    prepare_step,
    with_parts,
)
from recipes.recipe.spec import Budget, Recipe

FULL, ADAPTER = 1e-5, 1e-4
"""Learning rates; that of an adapter is ten times as high: docs/lora.md."""
RANK = 16


def _sft(
    name: str,
    model: str,
    dataset: str,
    cluster: str,
    about: str,
    *,
    stage: int,
    batch: int,
    tokens: int,
    rank: int = 0,
    qlora: bool = False,
    tensor_parallel: int = 1,
    hours: float = 24,
) -> Recipe:
    """tensor_parallel: of the engine that `evaluate` runs on this machine. tokens: longest row."""
    held_out = DATASETS[dataset].held_out
    config = with_parts(
        cloud_run(name, model, dataset),
        lora={"rank": rank, "qlora": qlora},
        rollout={"tensor_parallel": tensor_parallel},
        optimizer={
            "learning_rate": ADAPTER if rank else FULL,
            "schedule": "cosine",
            "warmup_ratio": 0.03,
            "floor": 0.1,
            "zero_stage": stage,
        },
        sft={"batch_size": batch, "epochs": 3, "max_tokens": tokens},
        evaluation={"every_steps": 100 if held_out != "train" else 0, "split": held_out, "max_samples": 512},
    )
    return Recipe(
        name=name,
        description=f"SFT of {model.partition('/')[2].removesuffix('-Instruct')} on {dataset}, {about}",
        config=replace(config, method="sft"),
        cluster=CLUSTERS[cluster],
        dataset=DATASETS[dataset],
        steps=() if dataset == "mathv60k-worked" else (prepare_step(dataset),),
        budget=Budget(max_hours=hours),
    )


def qwen2_5_7b_lora() -> Recipe:
    """One 80 GB GPU."""
    about = f"LoRA of rank {RANK} (one GPU)"
    return _sft(
        "sft-qwen2.5-7b-lora",
        TEXT_MODELS["7b"],
        "alpaca",
        "1x1",
        about,
        stage=2,
        batch=128,
        tokens=2048,
        rank=RANK,
    )


def qwen2_5_14b_full() -> Recipe:
    """One node of 8."""
    return _sft(
        "sft-qwen2.5-14b-full",
        TEXT_MODELS["14b"],
        "alpaca",
        "1x8",
        "all weights (1 x 8)",
        stage=3,
        batch=128,
        tokens=2048,
        tensor_parallel=2,
    )


def qwen2_5_72b_qlora() -> Recipe:
    """One 80 GB GPU: 38 GiB of weights, where bf16 has 136. On one rank nothing is gathered at any stage."""
    about = f"LoRA of rank {RANK} on 4 bits (one GPU)"
    return _sft(
        "sft-qwen2.5-72b-qlora",
        TEXT_MODELS["72b"],
        "alpaca",
        "1x1",
        about,
        stage=2,
        batch=128,
        tokens=2048,
        rank=RANK,
        qlora=True,
        hours=72,
    )


def qwen2_5_72b_full() -> Recipe:
    """Sixteen nodes of 8, with a copy of the weights per node (hpZ): the backward pass gathers over NVLink.

    The run it follows saves every 500 steps, more than this one has: the interval is Young and Daly's.
    """
    recipe = _sft(
        "sft-qwen2.5-72b-full",
        TEXT_MODELS["72b"],
        "alpaca",
        "16x8",
        "all weights (16 x 8)",
        stage=3,
        batch=512,
        tokens=2048,
        tensor_parallel=8,
        hours=48,
    )
    return replace(recipe, config=with_parts(recipe.config, optimizer={"hpz_ranks": 8}))


def qwen2_5_vl_7b_lora() -> Recipe:
    """One 80 GB GPU; the rows are worked answers that a model of yours gave: docs/sft.md."""
    about = f"LoRA of rank {RANK} (one GPU)"
    return _sft(
        "sft-qwen2.5-vl-7b-lora",
        VISION_MODELS["qwen2.5-vl"]["7b"],
        "mathv60k-worked",
        "1x1",
        about,
        stage=2,
        batch=128,
        tokens=4096,
        rank=RANK,
        hours=48,
    )


def qwen2_5_vl_7b_full() -> Recipe:
    """One node of 8."""
    return _sft(
        "sft-qwen2.5-vl-7b-full",
        VISION_MODELS["qwen2.5-vl"]["7b"],
        "mathv60k-worked",
        "1x8",
        "all weights (1 x 8)",
        stage=2,
        batch=128,
        tokens=4096,
        tensor_parallel=2,
    )
