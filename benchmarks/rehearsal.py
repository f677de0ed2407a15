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

OUT = Path(__file__).with_suffix(".json")
RECIPES = tuple(f"grpo-qwen2.5-vl-{size}-mathv60k" for size in ("3b", "7b", "32b", "72b"))
WHATS = ("logprobs", "update")
KINDS = ("longest", "full")


def played(recipe: str, what: str, kind: str) -> dict[str, Any]:
    """What one pass did, from a process of its own."""
    command = [sys.executable, "-m", "tests.rehearsal.fake_pass", recipe, what, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


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


if __name__ == "__main__":
    main()
