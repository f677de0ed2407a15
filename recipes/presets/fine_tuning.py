"""Supervised fine-tuning of Qwen2.5 and Qwen2.5-VL: adapters on one GPU to all weights of 72B on 16 nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from recipes.presets.models_and_data import (
    CLUSTERS,
    DATASETS,
    MODELS,
    cloud_recipe,
    title_of,
    with_parts,
)
from recipes.recipe.spec import Recipe

FULL, ADAPTER = 1e-5, 1e-4
"""Learning rates; that of an adapter is ten times as high: docs/lora.md."""
RANK = 16
LORA = f"LoRA of rank {RANK} (one GPU)"
WORKED = "mathv60k-worked"
"""Rows that nobody publishes: worked answers that a model of yours gave (docs/sft.md)."""


def _sft(
    name: str,
    model: str,
    dataset: str,
    machines: str,
    about: str,
    *,
    stage: int,
    batch: int = 128,
    tokens: int = 2048,
    tensor_parallel: int = 1,
    hours: float = 24,
) -> Recipe:
    """tokens: longest row. tensor_parallel: of the engine that `evaluate` runs on this machine."""
    held_out = DATASETS[dataset].held_out
    rank = RANK if "LoRA" in about else 0
    recipe = cloud_recipe(
        name,
        f"SFT of {title_of(model)} on {dataset}, {about}",
        model,
        dataset,
        CLUSTERS[machines],
        hours,
        lora={"rank": rank, "qlora": "4 bits" in about},
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
    steps = () if dataset == WORKED else recipe.steps
    return replace(recipe, config=replace(recipe.config, method="sft"), steps=steps)


def _72b_full() -> Recipe:
    """Sixteen nodes of 8, with a copy of the weights per node (hpZ): the backward pass gathers over NVLink.

    The run it follows saves every 500 steps, more than this one has: the interval is Young and Daly's.
    """
    about = "all weights (16 x 8)"
    name, model = "sft-qwen2.5-72b-full", MODELS["qwen2.5"]["72b"]
    recipe = _sft(name, model, "alpaca", "16x8", about, stage=3, batch=512, tensor_parallel=8, hours=48)
    return replace(recipe, config=with_parts(recipe.config, optimizer={"hpz_ranks": 8}))


_SMALL = {"dataset": "alpaca", "machines": "1x1", "about": LORA, "stage": 2}
_MIDDLE = {"machines": "1x8", "about": "all weights (1 x 8)", "tensor_parallel": 2}
_QLORA = f"LoRA of rank {RANK} on 4 bits (one GPU)"
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    # On one rank nothing is gathered at any stage. In 4 bits 72B has 38 GiB of weights, where bf16 has 136.
    "sft-qwen2.5-7b-lora": (MODELS["qwen2.5"]["7b"], _SMALL),
    "sft-qwen2.5-14b-full": (MODELS["qwen2.5"]["14b"], _MIDDLE | {"dataset": "alpaca", "stage": 3}),
    "sft-qwen2.5-72b-qlora": (MODELS["qwen2.5"]["72b"], _SMALL | {"about": _QLORA, "hours": 72}),
    "sft-qwen2.5-vl-7b-lora": (
        MODELS["qwen2.5-vl"]["7b"],
        _SMALL | {"dataset": WORKED, "tokens": 4096, "hours": 48},
    ),
    "sft-qwen2.5-vl-7b-full": (
        MODELS["qwen2.5-vl"]["7b"],
        _MIDDLE | {"dataset": WORKED, "stage": 2, "tokens": 4096},
    ),
}
RECIPES: dict[str, Callable[[], Recipe]] = {"sft-qwen2.5-72b-full": _72b_full}
for _name, (_model, _settings) in _ROWS.items():
    RECIPES[_name] = partial(_sft, _name, _model, **_settings)
