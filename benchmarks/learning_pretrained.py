"""Does the pretrained demo learn?

    python -m benchmarks.learning_pretrained --seeds 0,1,2 --folder KEPT

For every seed the run of `launch.py demo --pretrained`: accuracy on held-out questions, by step. With
`--control` the first seed runs once more, shorter, at learning rate 0.
Model, rows and runs stay in the folder, so that a call that is interrupted goes on where it was, and one with
`--minutes` interrupts itself. Runs that the output file has are not repeated. Without `--set` it draws
docs/learning_pretrained.svg from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.learning import ROOT, call
from benchmarks.machine import processor
from benchmarks.presets import HIGH, PAD, WIDE, panel
from recipes.presets.demo import pretrained
from trainer import config as c
from trainer.observe.history import read_history

PLOT = ROOT / "docs" / "learning_pretrained.svg"
CONTROL_STEPS = 8
"""Steps of the run with learning rate 0."""
UNFINISHED = 3
"""Exit code when the minutes are over before the runs are."""


def settings(seed: int, kept: Path, folder: Path, assignments: list[str]) -> c.RunConfig:
    """The demo's run of one seed, without a store. kept: where model and rows are; folder: where it runs."""
    base = pretrained().config
    name = f"seed-{seed}"
    config = replace(
        base,
        run=replace(base.run, seed=seed, name=name, id=name, dir=str(folder / name)),
        model=replace(base.model, path=str(kept / "model")),
        data=replace(base.data, path=str(kept / "arithmetic")),
        checkpoint=replace(base.checkpoint, remote="", keep_last=1, export_hf="never"),
    )
    return c.override(config, assignments)


def run(config: c.RunConfig, seconds: float) -> bool:
    """Starts a run, or goes on with it; True if it came to its end, False if the time did."""
    path = Path(f"{config.run.dir}.yaml")
    path.write_text(c.dump(config))
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    with open(f"{config.run.dir}.log", "a") as log:
        command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it saves its state and ends
            process.wait()
            return False
    if code:
        raise SystemExit(f"the run of {path} ended with {code}: see {config.run.dir}.log")
    return True


def measured(seed: int, config: c.RunConfig) -> dict[str, Any]:
    """What a finished run's metrics say."""
    lines = read_history(Path(config.run.dir))
    curve = {str(line["step"]): round(line["eval/accuracy"], 4) for line in lines if "eval/accuracy" in line}
    kinds = sorted(name for name in lines[0] if name.startswith("eval/accuracy_"))
    steps = [line["time/step_s"] for line in lines if line["step"]]
    return {
        "seed": seed,
        "accuracy": curve,
        "gain_points": round(100 * (list(curve.values())[-1] - curve["0"]), 1),
        "by_kind": {k.rpartition("_")[2]: [round(lines[0][k], 3), round(lines[-1][k], 3)] for k in kinds},
        "steps": lines[-1]["step"],
        "median_step_s": round(statistics.median(steps), 1),
        "minutes": round(sum(steps) / 60, 1),
    }


def asked(evaluation: c.Evaluation) -> str:
    """What an accuracy is the mean of."""
    times = f"{evaluation.samples_per_prompt} completions of each at temperature {evaluation.temperature:g}"
    return f"accuracy on {evaluation.max_samples} held-out questions, {times}"


def plot(runs: list[dict[str, Any]]) -> str:
    """All seeds in one panel, as SVG."""
    last = max(int(step) for one in runs for step in one["accuracy"])
    body = panel("held-out accuracy", [one["accuracy"] for one in runs], last)
    style = "font-family:sans-serif;font-size:11px;fill:#333"
    size = f"0 0 {WIDE + PAD + 20} {HIGH + 2 * PAD}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}"><g style="{style}">\n{body}\n</g></svg>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=Path, required=True, help="where model, rows and runs are kept")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="of this call (default: a day)")
    parser.add_argument("--control", action="store_true", help="also a run at learning rate 0")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="other settings")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    call("examples.pretrained.smollm2", "--out", str(folder / "model"))
    if not (folder / "arithmetic" / "manifest.json").exists():
        call("examples.pretrained.arithmetic", "--out", str(folder / "arithmetic"))

    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    runs = result["runs"]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for seed in seeds:
        if any(one["seed"] == seed for one in runs):
            continue
        config = settings(seed, folder, folder, options.set)
        if not run(config, end - time.monotonic()):
            return UNFINISHED
        runs.append(measured(seed, config))
        print(json.dumps(runs[-1]), flush=True)
        result |= {
            "machine": f"{os.cpu_count()} cores, {processor()}",
            "load_average": round(os.getloadavg()[2], 1),
            "metric": asked(config.evaluation),
            "worst_gain_points": min(one["gain_points"] for one in runs),
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        if not options.set:
            PLOT.write_text(plot(runs))

    if options.control and "learning_rate_0" not in result:
        still = ["optimizer.learning_rate=0", f"run.max_steps={CONTROL_STEPS}"]
        config = settings(seeds[0], folder, folder / "control", [*options.set, *still])
        Path(config.run.dir).parent.mkdir(exist_ok=True)
        if not run(config, end - time.monotonic()):
            return UNFINISHED
        result["learning_rate_0"] = measured(seeds[0], config)
        print(json.dumps(result["learning_rate_0"]), flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
