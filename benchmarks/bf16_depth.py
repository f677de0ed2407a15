"""How far bf16 carries engine and policy from the same weights in fp32, by family and depth:
`python -m benchmarks.bf16_depth`, which writes bf16_depth.json.

Models with random weights (1/sqrt(width), as in the tests), and one that was trained, SmolLM2-135M-Instruct.
vLLM samples on a CPU; the same tokens are scored by the trainer's policy and by transformers' own padded
forward pass, in bf16, and by the latter in fp32, once more with embeddings that are nudged as one rounding
would. Then a decoder layer's weights arrive in the engine as zeros, and completions as short as the probe's
are sampled: what a fault looks like beside rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning import call
from benchmarks.machine import processor
from examples.demo import tiny_model
from tests.learning.ranks import Ranks
from tests.servers import free_port
from trainer import config as c
from trainer.ranks.environment import rank_environment

OUT = Path(__file__).with_suffix(".json")
DEPTHS = (2, 4, 8, 16, 24)
WIDE = (("qwen3_5", 24, 128), ("qwen3_5", 24, 256))
CASES = [*itertools.product(("qwen3_5", "qwen3_vl"), DEPTHS, (64,)), *WIDE]
"""Family, layers and width."""
SMOLLM2 = "smollm2-135m-instruct"


def built(folder: Path, family: Any, layers: int, width: int) -> Path:
    """A model with random weights."""
    shape = tiny_model.TinyShape(width, 2 * width, layers, width // 32, width // 64, 64, 128, 2, False)
    tiny_model.SHAPES["deep"] = shape
    return tiny_model.build(folder, 0, "deep", family)  # ty: ignore[invalid-argument-type]


def settings(folder: Path, model: Path, data: Path) -> c.RunConfig:
    """One CPU rank in bf16."""
    changes = [
        f"run.dir={folder / 'run'}",
        f"model.path={model}",
        "model.dtype=bf16",
        f"data.path={data}",
        "data.prompt_max_tokens=300",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_tokens=96",
        "rollout.kv_cache_gib=0.5",
        "algorithm.kl_coef=0",
        "placement.workers_per_node=1",
        "placement.device=cpu",
    ]
    return c.override(c.RunConfig(), changes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": f"{os.cpu_count()} CPU cores, {processor()}", "cases": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shapes = folder / "shapes"
        arithmetic = folder / "arithmetic"
        trained = folder / SMOLLM2
        call("examples.demo.shapes", "--out", str(shapes))
        call("examples.pretrained.arithmetic", "--out", str(arithmetic))
        call("examples.pretrained.smollm2", "--out", str(trained))
        ranks = Ranks(dict(rank_environment(settings(folder, trained, arithmetic))))

        def measured(about: dict[str, Any], model: Path, data: Path) -> None:
            path, out = folder / "run.yaml", folder / "out.json"
            path.write_text(c.dump(settings(folder, model, data)))
            (code,) = ranks.run("rounded_logprobs", path, free_port(), [out], 900)
            assert code == 0, out.with_suffix(".log").read_text()[-3000:]
            result["cases"].append(about | json.loads(out.read_text()))
            print(json.dumps(result["cases"][-1]), flush=True)

        try:
            for family, layers, width in CASES:
                about = {"family": family, "layers": layers, "width": width, "weights": "random"}
                measured(about, built(folder / "model", family, layers, width), shapes)
            about = {"family": "llama", "layers": 30, "width": 576, "weights": SMOLLM2}
            measured(about, trained, arithmetic)
        finally:
            ranks.close()
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
