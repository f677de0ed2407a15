"""Does the demo learn, how fast, and is it the policy update that does it?

    python benchmarks/learning.py --seeds 0,1,2 --out benchmarks/learning.json

For every seed: a warm start of its own (random weights, supervised phase), GRPO with the demo's settings, and
the same run with learning rate 0 (shorter: nothing changes there). Accuracy is the mean over four completions
of every held-out row at temperature 1; `greedy` is that of greedy decoding, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from recipes.presets.demo import demo
from trainer import config as c

ROOT = Path(__file__).parent.parent
CONTROL_STEPS = 20
"""Steps of the run with learning rate 0."""


def call(*arguments: str) -> float:
    """Runs a module of the project in the repository; returns its wall-clock seconds."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return time.monotonic() - started


def train(config: c.RunConfig, folder: Path, name: str) -> tuple[float, list[dict]]:
    """One GRPO run: its wall-clock seconds, start and end included, and its metrics."""
    config = replace(config, run=replace(config.run, name=name, id=name, dir=str(folder / name)))
    path = folder / f"{name}.yaml"
    path.write_text(c.dump(config))
    seconds = call("trainer.loops.grpo", "--config", str(path))
    return seconds, [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def greedy(config: c.RunConfig, folder: Path, name: str, model: Path) -> float:
    """Held-out greedy accuracy of a model: the evaluation before the first of no steps that learn."""
    config = replace(
        config,
        model=replace(config.model, path=str(model)),
        optimizer=replace(config.optimizer, learning_rate=0.0),
        evaluation=replace(config.evaluation, temperature=0.0, samples_per_prompt=1, max_samples=0),
        run=replace(config.run, max_steps=1),
        checkpoint=replace(config.checkpoint, export_hf="never"),
    )
    return train(config, folder, name)[1][0]["eval/accuracy"]


def demo_config(seed: int, data: Path, model: Path) -> c.RunConfig:
    """The demo's run of a warm-started model, without a store and without logged samples."""
    base = demo().config
    return replace(
        base,
        run=replace(base.run, seed=seed),
        model=replace(base.model, path=str(model)),
        data=replace(base.data, path=str(data)),
        checkpoint=replace(base.checkpoint, remote=""),
        logging=replace(base.logging, samples_per_step=0),
    )


def measure(seed: int, data: Path, folder: Path) -> dict:
    model = folder / "model"
    load = os.getloadavg()[0]
    warm_s = call("examples.demo.warm_start", "--data", str(data), "--out", str(model), "--seed", str(seed))
    config = demo_config(seed, data, model)
    grpo_s, lines = train(config, folder, "grpo")
    still = replace(
        config,
        optimizer=replace(config.optimizer, learning_rate=0.0),
        run=replace(config.run, max_steps=CONTROL_STEPS),
        checkpoint=replace(config.checkpoint, export_hf="never"),
    )
    control = train(still, folder, "control")[1]
    steps = [line for line in lines if line["step"]]
    curve = {line["step"]: round(line["eval/accuracy"], 4) for line in lines if "eval/accuracy" in line}
    by_kind = {}
    for name in lines[0]:
        if name.startswith("eval/accuracy_"):
            by_kind[name.rpartition("_")[2]] = [round(lines[0][name], 3), round(lines[-1][name], 3)]
    still_curve = {m["step"]: round(m["eval/accuracy"], 4) for m in control if "eval/accuracy" in m}
    return {
        "seed": seed,
        "warm_start_s": round(warm_s, 1),
        "grpo_s": round(grpo_s, 1),
        "total_s": round(warm_s + grpo_s, 1),
        "median_step_s": round(statistics.median(line["time/step_s"] for line in steps), 3),
        "accuracy": curve,
        "gain_points": round(100 * (curve[max(curve)] - curve[0]), 1),
        "by_kind": by_kind,
        "greedy": [
            round(greedy(config, folder, "greedy-before", model), 4),
            round(greedy(config, folder, "greedy-after", folder / "grpo" / "hf"), 4),
        ],
        "learning_rate_0": still_curve,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "learning.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "shapes"
        data_s = call("examples.demo.shapes", "--out", str(data))
        runs = []
        for seed in map(int, options.seeds.split(",")):
            folder = Path(scratch) / str(seed)
            folder.mkdir()
            runs.append(measure(seed, data, folder))
            print(json.dumps(runs[-1]), flush=True)
            gains = [run["gain_points"] for run in runs]
            result = {
                "machine": f"{os.cpu_count()} CPU cores, niceness {os.nice(0)}",
                "metric": "held-out accuracy, 128 rows x 4 completions at temperature 1",
                "data_s": round(data_s, 1),
                "median_gain_points": statistics.median(gains),
                "worst_gain_points": min(gains),
                "median_total_s": statistics.median(r["total_s"] for r in runs),
                "runs": runs,
            }
            Path(options.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
