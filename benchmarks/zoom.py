"""Does a model learn to look again, and is it worth it?

    python -m benchmarks.zoom --folder KEPT

Digits that cannot be read in the picture as the model sees it (examples/zoom/framed.py), with the tool `zoom`
beside without. For every seed: a tiny model of random weights, a supervised phase on short rows, another on
the same pictures (with episodes that call the tool, or with replies that answer at once), and GRPO for the
same number of steps.
Accuracy is the mean over two completions of every held-out row at temperature 1; a tenth is chance.

Rows, models and runs stay in the folder: a call that is stopped goes on where it was. Every finished run is
in the output file at once, and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import one_process
from benchmarks.learning import demo_config
from benchmarks.machine import processor
from examples.demo import tiny_model, warm_start
from examples.zoom import framed
from trainer import config as c
from trainer.observe.history import read_history

OUT = Path(__file__).with_suffix(".json")
SPLITS = {"zoom": "warm", "off": "plain"}
"""`turns.environment`, and the split of the second supervised phase."""
SUPERVISED_STEPS = {"short": 150, "warm": 100, "plain": 100}
STEPS = 30
LIMITS = ("model.max_pixels=7056", "placement.workers_per_node=1", "placement.threads_per_worker=1")
TOLD = ("turns/replies_mean", "turns/errors_mean", "tokens/response_mean")


def supervised(split: str, seed: int, data: Path, folder: Path) -> Path:
    """The model after learning a split: `short` from random weights, the others after it."""
    out = folder / f"{split}-{seed}"
    if not (out / "hf" / "config.json").exists():
        if split == "short":
            before = tiny_model.build(folder / f"base-{seed}", seed, tokenizer=framed.tokenizer())
        else:
            before = supervised("short", seed, data, folder)
        config = warm_start.configuration(before, str(data), out, seed, SUPERVISED_STEPS[split], 1, "cpu")
        one_process.run(c.override(config, [f"data.split={split}", *LIMITS]))
    return out / "hf"


def config_of(environment: str, seed: int, data: Path, folder: Path) -> c.RunConfig:
    """The GRPO run."""
    config = demo_config(seed, data, supervised(SPLITS[environment], seed, data, folder))
    name = f"grpo-{environment}-{seed}"
    turns = replace(framed.TURNS, environment=environment)
    config = replace(
        config,
        turns=turns,
        expected=c.Expected(),
        run=replace(config.run, name=name, id=name, dir=str(folder / name), max_steps=STEPS),
    )
    return c.override(
        config,
        [
            "rollout.prompts_per_step=16",
            "rollout.max_tokens=224",
            "evaluation.samples_per_prompt=2",
            "checkpoint.export_hf=never",
            "checkpoint.keep_last=1",
            "logging.samples_per_step=4",
            *LIMITS,
        ],
    )


def measured(config: c.RunConfig) -> dict[str, Any]:
    """What a finished run's metrics say: accuracy by step, and what the first and the last step did."""
    lines = read_history(config.run.dir)
    curve = {line["step"]: round(line["eval/accuracy"], 4) for line in lines if "eval/accuracy" in line}
    steps = [line for line in lines if line["step"]]
    told = {}
    for name in TOLD:
        if name in steps[-1]:
            told[name] = [round(steps[0][name], 3), round(steps[-1][name], 3)]
    return {"accuracy": curve, "gain_points": round(100 * (curve[max(curve)] - curve[0]), 1), **told}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=Path, required=True, help="where models, rows and runs are kept")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    folder = options.folder.absolute()
    data = folder / "framed"
    if not (data / "manifest.json").exists():
        framed.prepare(data)
    runs: list[dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    done = {(one["environment"], one["seed"]) for one in runs}
    for seed in map(int, options.seeds.split(",")):
        for environment in SPLITS:
            if (environment, seed) in done:
                continue
            config = config_of(environment, seed, data, folder)
            one_process.run(config)
            runs.append({"environment": environment, "seed": seed, **measured(config)})
            print(json.dumps(runs[-1]), flush=True)
            result = {
                "machine": f"{os.cpu_count()} cores, {processor()}",
                "metric": "held-out accuracy, 128 rows x 2 completions at temperature 1; chance is 0.1",
                "supervised_steps": SUPERVISED_STEPS,
                "runs": runs,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
