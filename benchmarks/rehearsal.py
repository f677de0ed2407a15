"""Passes of the recipes at their true shapes on tensors that hold nothing, against the plan: `python -m
benchmarks.rehearsal`. Arithmetic of what torch would allocate (tests/rehearsal/fake_pass.py), so no processor
matters to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.plan import cost, hub_config
from recipes.presets import get
from trainer.hardware.gpus import gpu_named

OUT = Path(__file__).with_suffix(".json")
RECIPES = tuple(f"grpo-qwen2.5-vl-{size}-mathv60k" for size in ("3b", "7b", "32b", "72b"))
WHATS = ("logprobs", "update")
LONGEST, USUAL = KINDS = ("longest", "full")


def played(recipe: str, what: str, kind: str) -> dict[str, Any]:
    """What one pass did, from a process of its own."""
    command = [sys.executable, "-m", "tests.rehearsal.fake_pass", recipe, what, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(recipe: str, what: str, one: dict[str, Any], gpu: str = "H100") -> tuple[float, float]:
    """A pass's roofline, and the plan's time for its tokens. Attention's own kernel is in neither."""
    shape, card = hub_config.shape(get(recipe).config.model), gpu_named(gpu)
    assert shape is not None
    products = one["matrix_flops"] / (card.bf16_tflops * 1e12 * cost.PRODUCTS)
    others = one["moved_bytes"] / (card.hbm_gb_per_s * 1e9 * cost.TRAFFIC)
    forwards = 4 if what == "update" else 1  # forward, again, and backward at twice the work
    return products + others, forwards * one["tokens"] * cost.token_seconds(shape, card)


def roofline_row(recipe: str, what: str, one: dict[str, Any]) -> str:
    """The pass in the table of docs/memory.md."""
    roof, planned = seconds(recipe, what, one)
    size = recipe.split("-")[3].upper()
    work = f"{one['matrix_flops'] / 1e12:,.0f} | {one['moved_bytes'] / 1e9:,.0f}"
    tokens = f"{one['tokens']:,}"
    return f"| {size} {what} | {tokens} | {work} | {roof:.2f} | {planned:.2f} | {planned / roof:.2f} |"


def main() -> None:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "passes": {},
    }
    for recipe in RECIPES:
        for what in WHATS:
            for kind in KINDS:
                name = f"{recipe} {what} {kind}"
                found["passes"][name] = one = played(recipe, what, kind)
                peak, planned = one["peak_bytes"] / 2**30, one["planned_bytes"] / 2**30
                print(f"{name:<52} {peak:6.2f} GiB, planned {planned:6.2f}: {peak / planned:.2f}", flush=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    for recipe in RECIPES:
        for what in WHATS:
            print(roofline_row(recipe, what, found["passes"][f"{recipe} {what} {USUAL}"]))


if __name__ == "__main__":
    main()
