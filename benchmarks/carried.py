"""Engine iterations and seconds of rollout phases with completions that are carried over and without, in one
process: `python -m benchmarks.carried`, which writes carried.json.

A random model of the demo's size on a CPU, whose completions end at the lengths that the plan draws for the
7B recipe (mean of 400 tokens, limit of 2,048); one engine's share of a step. Beside the ratio of the
iterations is what the plan's model says of the same lengths. Iterations are the same on any machine; seconds
are not: `--loaded`, where others compute beside it, leaves them out.
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
from recipes.plan import passes, rollout_phase
from recipes.presets import get
from tests.learning.carried import RECIPE, drawn
from tests.learning.ranks import Ranks
from tests.servers import free_port
from trainer import config as c
from trainer.algorithm.scheduling import SampleLength
from trainer.ranks.environment import rank_environment

OUT = Path(__file__).with_suffix(".json")


def settings(folder: Path, prompts: int, steps: int) -> c.RunConfig:
    """One CPU rank with one engine."""
    rollout = get(RECIPE).config.rollout
    changes = [
        f"run.dir={folder / 'run'}",
        f"run.max_steps={steps}",
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'data'}",
        "data.prompt_max_tokens=300",
        f"rollout.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={rollout.samples_per_prompt}",
        f"rollout.max_tokens={rollout.max_tokens}",
        "rollout.kv_cache_gib=1",
        "algorithm.kl_coef=0",
        "placement.workers_per_node=1",
        "placement.device=cpu",
    ]
    return c.override(c.RunConfig(), changes)


def modeled(config: c.RunConfig, ahead: int, cut: int) -> float:
    """Decode steps of a phase by the plan's model, whose steps all have the same lengths: mean over those of
    the measured ones."""
    options = [f"rollout.staleness={ahead}", f"rollout.tokens_per_step={cut}"]
    changed = c.override(config, options)
    steps = config.run.max_steps
    longest = []
    for step in range(steps):
        lengths = []
        for prompt, samples in enumerate(drawn(step, config.rollout.prompts_per_step, steps)):
            lengths += [SampleLength(prompt, 1, tokens, 0) for tokens in samples]
        phase = rollout_phase.of_step(passes.Passes(tuple(lengths), (), (), 0), changed)
        longest.append(phase.longest)
    return sum(longest) / len(longest)


def measured(config: c.RunConfig, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """What tests/learning/carried.py found."""
    path, out = folder / "run.yaml", folder / "out.json"
    path.write_text(c.dump(config))
    ranks = Ranks(dict(rank_environment(config)))
    try:
        (code,) = ranks.run("carried", path, free_port(), [out], timeout_s)
    finally:
        ranks.close()
    assert code == 0, out.with_suffix(".log").read_text()[-3000:]
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, for the engine (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured phases (%(default)s)")
    parser.add_argument("--loaded", action="store_true", help="others compute beside it: no seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny_model.build(folder / "model", 0)
        call("examples.demo.shapes", "--out", str(folder / "data"), "--rows", "64", "--test-rows", "8")
        config = settings(folder, options.prompts, options.steps)
        rows = measured(config, folder, 7200)
    for row in rows:
        row["model_iterations"] = modeled(config, row["staleness"], row["tokens_per_step"])
        row["iterations_ratio"] = rows[0]["iterations"] / row["iterations"]
        row["model_ratio"] = rows[0]["model_iterations"] / row["model_iterations"]
        row["seconds_ratio"] = rows[0]["seconds"] / row["seconds"]
    for row in rows:
        if options.loaded:
            del row["seconds"], row["seconds_ratio"]
        print(json.dumps(row), flush=True)
    result = {
        "machine": f"{os.cpu_count()} CPU cores, {processor()}",
        "seconds_left_out": options.loaded,
        "lengths": RECIPE,
        "prompts": options.prompts,
        "steps": options.steps,
        "schedules": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
