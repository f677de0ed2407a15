"""Float32 matrix products on one core, oneDNN against torch's default: `python -m benchmarks.cpu_matmul`.

The shapes are those of the forward pass, the gradient of the input and that of the weight in a layer of the
demo's model (width 128) and of step_time.py's medium one (512 -> 1536). They take turns call by call; writes
cpu_matmul.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from trainer.ranks import cpu_matmul

LAYERS = {"demo": (2000, 128, 256), "medium": (1000, 512, 1536)}
"""Tokens of a micro-batch, inputs, outputs."""
CALLS = 200


def measure(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Median GFLOP/s of both, and the ratio of the medians."""
    seconds: dict[str, list[float]] = {"torch": [], "oneDNN": []}
    for _ in range(CALLS):
        for name, product in (("torch", torch.mm), ("oneDNN", cpu_matmul.matmul)):
            began = time.perf_counter()
            product(a, b)
            seconds[name].append(time.perf_counter() - began)
    work = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e9
    speed = {name: round(work / statistics.median(s), 1) for name, s in seconds.items()}
    return {**speed, "ratio": round(speed["oneDNN"] / speed["torch"], 2)}


def main() -> None:
    """Measures all and writes the JSON."""
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {}
    for name, (tokens, inputs, outputs) in LAYERS.items():
        x = torch.randn(tokens, inputs)
        w = torch.randn(outputs, inputs)
        dy = torch.randn(tokens, outputs)
        for product, a, b in (
            ("forward", x, w.t()),
            ("input gradient", dy, w),
            ("weight gradient", dy.t(), x),
        ):
            result[f"{name}, {product}"] = measure(a, b)
            print(f"{name}, {product}: {result[f'{name}, {product}']}", flush=True)
    record = {"unit": "GFLOP/s on one core, median", "torch": torch.__version__, "products": result}
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
