"""Passes of the recipes at their true shapes on tensors that hold nothing, against the plan: `python -m
benchmarks.rehearsal`, or with the names of some recipes. Arithmetic of what torch would allocate
(tests/rehearsal/fake_pass.py), so no processor matters to it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.plan import activations, hub_config, step_seconds
from recipes.presets import RECIPES, get
from recipes.recipe.spec import Recipe
from trainer.config import RunConfig
from trainer.config.budget import logprob_tokens, longest_sample, micro_batch_tokens
from trainer.config.run_folder import write_whole
from trainer.hardware.gpus import gpu_named
from trainer.hardware.model_shapes import Shape

OUT = Path(__file__).with_suffix(".json")
SHOWN = tuple(f"grpo-qwen2.5-vl-{size}-mathv60k" for size in ("3b", "7b", "32b", "72b"))
"""Recipes whose plan is held against their roofline."""
EACH = (("logprobs", "longest"), ("update", "longest"))
"""(what, kind of row) of the passes that nearly every recipe plays: longest samples."""
SHARED = (("logprobs", "shared"), ("update", "shared"))
"""Passes whose completions share prompts."""
SHARING = ("grpo-qwen3-vl-2b-mathv60k", "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen3.5-0.8b-mathv60k")
"""Recipes that play both kinds of rows: repeated keys weigh most in the first. With gated delta-net layers
shared rows take more than any other, and only they are played: each chunk of a row is some operations, and
there are many."""
LOSS = ("loss", "usual")
"""What the smallest recipe of each kind plays besides: no shape matters to devices and reads."""


def decides(recipe: Recipe) -> tuple[Any, ...]:
    """All that a pass depends on: recipes with the same play the same passes."""
    config = recipe.config
    shape = hub_config.shape(config.model)
    assert shape is not None
    budget = micro_batch_tokens(config, shape), logprob_tokens(config, shape), longest_sample(config)
    vision = config.model.max_pixels, config.tower_trained
    grouped = config.data.prompt_max_tokens, config.rollout.samples_per_prompt
    lengths = grouped if config.method == "grpo" else ()
    kinds = config.method, config.model.dtype, config.model.gradient_checkpointing, config.lora
    return shape, budget, vision if shape.vision else (), lengths, kinds


def distinct() -> dict[str, list[str]]:
    """One recipe for each set of passes that the recipes on GPUs make, and all recipes that make it."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in RECIPES:
        recipe = get(name)
        if recipe.kind == "train" and recipe.cluster.gpus_per_node:
            found.setdefault(decides(recipe), []).append(name)
    return {names[0]: names for names in found.values()}


def planned_bytes(config: RunConfig, shape: Shape, learns: bool) -> float:
    """What the plan has for the pass beside weights and states."""
    # A pass of one rank: nothing is gathered, and each gradient goes as it comes.
    config = replace(config, placement=replace(config.placement, nodes=1, workers_per_node=1))
    if learns:
        halves = activations.scored(config, shape), activations.backward(config, shape)
        return max(sum(parts.values()) for parts in halves)
    tokens = logprob_tokens(config, shape)
    return max(activations.forward(config, shape, tokens), activations.logits(config, shape, tokens))


def plays(recipe: str) -> tuple[tuple[str, str], ...]:
    """The passes of a recipe."""
    smallest: dict[tuple[Any, ...], tuple[int, str]] = {}
    for name in distinct():
        config = get(name).config
        shape = hub_config.shape(config.model)
        assert shape is not None
        kind = (
            shape.vision and shape.vision.kind,
            bool(shape.delta),
            bool(shape.experts),
            config.method,
            bool(config.lora.rank),
        )
        if kind not in smallest or shape.parameters < smallest[kind][0]:
            smallest[kind] = shape.parameters, name
    with_loss = recipe in [name for _, name in smallest.values()]
    shape = hub_config.shape(get(recipe).config.model)
    assert shape is not None
    found = SHARED if shape.delta else EACH
    if recipe in SHARING:
        found = (*EACH, *SHARED)
    return (*found, LOSS) if with_loss else found


def played(recipe: str, what: str, kind: str) -> dict[str, Any]:
    """What one pass did, from a process of its own."""
    command = [sys.executable, "-m", "tests.rehearsal.fake_pass", recipe, what, kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(recipe: str, what: str, one: dict[str, Any], gpu: str = "H100") -> tuple[float, float]:
    """A pass's roofline, and the plan's time for its tokens. Attention's own kernel is in neither."""
    shape, card = hub_config.shape(get(recipe).config.model), gpu_named(gpu)
    assert shape is not None
    products = one["matrix_flops"] / (card.bf16_tflops * 1e12 * step_seconds.PRODUCTS)
    others = one["moved_bytes"] / (card.hbm_gb_per_s * 1e9 * step_seconds.TRAFFIC)
    forwards = 4 if what == "update" else 1  # forward, again, and backward at twice the work
    return products + others, forwards * one["tokens"] * step_seconds.token_seconds(shape, card)


def record(recipe: str, what: str, kind: str) -> None:
    """Plays a pass and merges it into the file at once: several may run."""
    one = played(recipe, what, kind)
    found = json.loads(OUT.read_text()) if OUT.exists() else {"passes": {}}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    found["passes"].setdefault(recipe, {})[f"{what}, {kind}"] = one
    write_whole(OUT, (json.dumps(found, indent=1) + "\n").encode())
    config = get(recipe).config
    shape = hub_config.shape(config.model)
    assert shape is not None
    peak = one["peak_bytes"] / 2**30
    planned = planned_bytes(config, shape, what != "logprobs") / 2**30
    print(f"{recipe} {what}, {kind}: {peak:.2f} GiB of {planned:.2f}: {peak / planned:.2f}", flush=True)


def main(recipes: list[str]) -> None:
    """Plays the recipes' passes."""
    for recipe in recipes or distinct():
        for what, kind in plays(recipe):
            record(recipe, what, kind)


if __name__ == "__main__":
    main(sys.argv[1:])
