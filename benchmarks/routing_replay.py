"""How far engine and policy are apart in a mixture of experts, with the engine's choices replayed and
without: `python -m benchmarks.routing_replay`, which writes routing_replay.json.

A Qwen3-VL-MoE with random weights, in bf16 and in fp32, on a CPU: vLLM samples the demo's rows, and the
trainer's policy computes the log-probabilities of the same tokens twice, once through the experts that vLLM
chose and once through those that its own routers choose.
"""

from __future__ import annotations

import argparse
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
SHAPE = tiny_model.TinyShape(256, 64, 12, 8, 2, 128, 256, 2, True)
EXPERTS, ACTIVE = 64, 8
TOKENS = 256
"""Longest completion."""


def model(folder: Path) -> Path:
    """Twelve layers of 64 experts, of which eight compute a token: as published models, half as many."""
    tiny_model.SHAPES["routed"] = SHAPE
    tiny_model.EXPERTS, tiny_model.ACTIVE = EXPERTS, ACTIVE
    return tiny_model.build(folder, 0, "routed", "qwen3_vl_moe")  # ty: ignore[invalid-argument-type]


def settings(folder: Path, path: Path, data: Path, dtype: str) -> c.RunConfig:
    """One CPU rank."""
    changes = [
        f"run.dir={folder / dtype / 'run'}",
        f"model.path={path}",
        f"model.dtype={dtype}",
        f"data.path={data}",
        "data.prompt_max_tokens=300",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        f"rollout.max_tokens={TOKENS}",
        "rollout.kv_cache_gib=0.5",
        "algorithm.routing_replay=true",
        "algorithm.kl_coef=0",
        "placement.workers_per_node=1",
        "placement.device=cpu",
    ]
    return c.override(c.RunConfig(), changes)


def measured(config: c.RunConfig, folder: Path) -> dict[str, Any]:
    """What tests/learning/replayed.py found."""
    path, out = folder / "run.yaml", folder / "out.json"
    path.write_text(c.dump(config))
    ranks = Ranks(dict(rank_environment(config)))
    try:
        (code,) = ranks.run("replayed", path, free_port(), [out], 540)
    finally:
        ranks.close()
    assert code == 0, out.with_suffix(".log").read_text()[-3000:]
    found = json.loads(out.read_text())
    return {name: found[name] for name in ("free", "replayed", "rerouted")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPU cores, {processor()}",
        "model": {"layers": SHAPE.layers, "hidden": SHAPE.hidden, "experts": EXPERTS, "active": ACTIVE},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = model(folder / "model")
        call("examples.demo.shapes", "--out", str(folder / "data"))
        for dtype in ("bf16", "fp32"):
            result[dtype] = measured(settings(folder, path, folder / "data", dtype), folder)
            print(dtype, json.dumps(result[dtype]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
