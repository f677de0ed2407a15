"""Does a student learn faster from a teacher than from rewards?

    python -m benchmarks.distillation --seeds 1,2,3 --out benchmarks/distillation.json

The teacher is what a finished GRPO run of the demo exported, from the warm start of seed 0. For every other
seed one warm start, and from it two runs: GRPO, and distillation without any reward. Both sample a few
completions per prompt, which a teacher judges token by token and rewards can only compare with each other.
Held-out accuracy is the mean over four completions of every row at temperature 1. What a step takes is
measured in a few steps of both, side by side, so that whatever else the machine does slows both alike. Runs
that are in the output file already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.learning import ROOT, call, demo_config, train
from benchmarks.machine import processor
from trainer import config as c

TEACHER_SEED = 0
LEVELS = (0.6, 0.65, 0.7, 0.75, 0.8)
"""Accuracies whose first step is told."""
TIMED = 12
"""Steps in which both runs are timed side by side."""
WARM_UP = 2
"""First steps that no figure of seconds is taken from."""
SAMPLES = 2
"""Completions per prompt of both runs; the demo has 8."""
STEPS = 40
DISTILLED = ("algorithm.kl_coef=0", "rewards.accuracy_weight=0", "rewards.format_weight=0")
"""What the demo changes besides naming its teacher."""


def warm_start(seed: int, data: Path, folder: Path) -> Path:
    """The model that a seed's runs begin with."""
    model = folder / "model"
    if not model.exists():
        call("examples.demo.warm_start", "--data", str(data), "--out", str(model), "--seed", str(seed))
    return model


def finer(config: c.RunConfig, steps: int) -> c.RunConfig:
    """The run with an evaluation every five steps, and of fewer steps where `steps` is not 0."""
    config = c.override(config, ["evaluation.every_steps=5"])
    return c.override(config, [f"run.max_steps={steps}"]) if steps else config


def described(lines: list[dict]) -> dict:
    """Accuracy by step, when it first reached each level, and seconds of a step."""
    own = [m["time/step_s"] - m.get("time/eval_s", 0.0) for m in lines if m["step"] > WARM_UP]
    curve = {m["step"]: round(m["eval/accuracy"], 4) for m in lines if "eval/accuracy" in m}
    reached = {}
    for level in LEVELS:
        reached[str(level)] = next((step for step, value in curve.items() if value >= level), None)
    out = {"accuracy": curve, "first_step": reached, "median_step_s": round(statistics.median(own), 3)}
    gaps = {m["step"]: round(m["teacher/kl"], 4) for m in lines if "teacher/kl" in m}
    return out | ({"teacher_kl": gaps} if gaps else {})


def finished(config: c.RunConfig, folder: Path, name: str) -> dict:
    """How a run learned; it is made, or gone on with, where it is not finished."""
    kept = folder / f"{name}.json"
    if not kept.exists():
        kept.write_text(json.dumps(described(train(config, folder, name)[1])))
    return json.loads(kept.read_text())


def teacher_of(data: Path, scratch: Path) -> tuple[Path, dict]:
    """The export of a finished demo run, and how it learned."""
    folder = scratch / "teacher"
    folder.mkdir(parents=True, exist_ok=True)
    model = warm_start(TEACHER_SEED, data, folder)
    learned = finished(finer(demo_config(TEACHER_SEED, data, model), 0), folder, "grpo")
    return folder / "grpo" / "hf", learned


def measure(seed: int, data: Path, scratch: Path, teacher: Path, steps: int, samples: int) -> dict:
    """Both runs of one student, and how long their steps take beside each other."""
    folder = scratch / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = finer(demo_config(seed, data, warm_start(seed, data, folder)), steps)
    config = replace(config, checkpoint=replace(config.checkpoint, export_hf="never"))
    config = c.override(config, [f"rollout.samples_per_prompt={samples}"])
    runs = {
        "grpo": config,
        "distilled": c.override(config, [f"algorithm.teacher={teacher}", *DISTILLED]),
    }
    found: dict[str, Any] = {name: finished(one, folder, name) for name, one in runs.items()}
    with ThreadPoolExecutor(len(runs)) as pool:
        timed = {}
        for name, one in runs.items():
            few = c.override(one, [f"run.max_steps={TIMED}", "evaluation.every_steps=0"])
            timed[name] = pool.submit(finished, few, folder, f"{name}-timed")
        seconds = {name: run.result()["median_step_s"] for name, run in timed.items()}
    ratio = round(seconds["distilled"] / seconds["grpo"], 3)
    return {"seed": seed, **found, "step_s_side_by_side": seconds, "step_ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of every student's run (default: {STEPS})")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help=f"completions per prompt (default: {SAMPLES})"
    )
    parser.add_argument("--scratch", help="keeps data, warm starts and runs here, for the next call")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "distillation.json"))
    options = parser.parse_args()
    out = Path(options.out)
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": []}
    runs: list[dict] = result["runs"]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(options.scratch or temporary)
        data = scratch / "shapes"
        if not data.exists():
            call("examples.demo.shapes", "--out", str(data))
        teacher, learned = teacher_of(data, scratch)
        for seed in map(int, options.seeds.split(",")):
            if any(run["seed"] == seed for run in runs):
                continue
            runs.append(measure(seed, data, scratch, teacher, options.steps, options.samples))
            print(json.dumps(runs[-1]), flush=True)
            result |= {
                "machine": f"{os.cpu_count()} CPU cores, {processor()}",
                "metric": "held-out accuracy, 128 rows x 4 completions at temperature 1",
                "completions_per_prompt": options.samples,
                "teacher": {"seed": TEACHER_SEED, **learned},
                "runs": sorted(runs, key=lambda run: run["seed"]),
            }
            out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
