"""Does it learn as well with completions that are carried over?

    python -m benchmarks.carried_learning --folder KEPT

The demo and the pretrained demo without, and with `rollout.staleness` 1 and 3 and a
`rollout.tokens_per_step` of a half and a quarter of the longest completion: held-out accuracy by step, and
by decode iterations (the longest piece of every rollout phase, summed up). The shipped demo's completions
have 17 tokens in the mean and 20 to 32 at most. Here its worked solutions say their reasoning several times,
a geometric number of them, so that their lengths have a tail; the pretrained demo's limit is twice as high.

Models, rows and runs stay in the folder: a call that is stopped goes on where it was. Every finished run is
in the output file at once, and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import one_process
from benchmarks.learning import call, demo_config
from benchmarks.learning_pretrained import settings as pretrained_config
from benchmarks.machine import processor
from benchmarks.presets import off_policy
from data_prep.write.shards import write_dataset
from examples.demo import tiny_model, warm_start
from trainer import config as c
from trainer.algorithm.traces import Trace
from trainer.checkpoint.rollout_log import logged_steps
from trainer.config.run_store import RunStore
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import Row
from trainer.observe.history import read_history

OUT = Path(__file__).with_suffix(".json")
LONGEST = {"demo": 64, "pretrained": 24}
"""`rollout.max_tokens` of each task."""
SCHEDULES = ((0, 0), (1, 2), (1, 4), (3, 2), (3, 4))
"""(`rollout.staleness`, the part of the longest completion that a piece is at most; 0: all of it)."""
REPEATS = 3.0
"""Mean number of times that a solution of the demo's warm-up says its reasoning."""
THINK = re.compile(r"(?<=<think>)(.*?)(?=</think>)")


def with_tail(rows: Dataset, seed: int) -> Iterator[Row]:
    """Rows whose solutions say their reasoning several times."""
    draw = np.random.default_rng(seed)
    for index in range(len(rows)):
        row = rows[index]
        times = int(draw.geometric(1 / REPEATS))
        said = THINK.search(row.solution)
        if said:
            row = replace(row, solution=THINK.sub(", ".join([said[0]] * times), row.solution))
        yield row


def long_shapes(folder: Path) -> Path:
    """The demo's data with long solutions."""
    out = folder / "long-shapes"
    if not (out / "manifest.json").exists():
        plain = folder / "shapes"
        call("examples.demo.shapes", "--out", str(plain))
        splits = {}
        for number, split in enumerate(read_manifest(str(plain)).rows):
            splits[split] = with_tail(Dataset(str(plain), split), number)
        write_dataset(out, "long-shapes", splits, {})
    return out


def config_of(task: str, seed: int, folder: Path) -> c.RunConfig:
    """The run without a schedule."""
    if task == "pretrained":
        call("examples.pretrained.smollm2", "--out", str(folder / "model"))
        if not (folder / "arithmetic" / "manifest.json").exists():
            call("examples.pretrained.arithmetic", "--out", str(folder / "arithmetic"))
        config = pretrained_config(seed, folder, folder, [])
    else:
        data, warm = long_shapes(folder), folder / f"warm-{seed}"
        model = warm / "hf"
        if not (model / "config.json").exists():
            base = tiny_model.build(folder / f"base-{seed}", seed)
            one_process.run(warm_start.configuration(base, str(data), warm, seed, warm_start.STEPS, 1, "cpu"))
        config = demo_config(seed, data, model)
    return c.override(
        config,
        [
            f"rollout.max_tokens={LONGEST[task]}",
            "logging.keep_rollouts=true",
            "checkpoint.export_hf=never",
            "checkpoint.keep_last=1",
            "placement.workers_per_node=1",
            "placement.threads_per_worker=1",
        ],
    )


def scheduled(config: c.RunConfig, task: str, ahead: int, part: int, folder: Path) -> c.RunConfig:
    """The run with one of SCHEDULES, in a folder of its own."""
    limit = LONGEST[task] // part if part else 0
    name = f"{task}-{config.run.seed}-{ahead}-{limit}"
    config = replace(config, run=replace(config.run, name=name, id=name, dir=str(folder / name)))
    return c.override(config, [f"rollout.staleness={ahead}", f"rollout.tokens_per_step={limit}"])


def longest_piece(traces: list[Trace], version: int) -> int:
    """Most tokens that a version sampled of one of these completions."""
    return max((int((trace.token_versions == version).sum()) for trace in traces), default=0)


def measured(config: c.RunConfig) -> dict[str, Any]:
    """What a finished run's metrics and rollout logs say."""
    folder = Path(config.run.dir)
    lines = read_history(folder)
    curve = {line["step"]: round(line["eval/accuracy"], 4) for line in lines if "eval/accuracy" in line}
    iterations = {0: 0}
    done = 0
    lengths: list[int] = []
    for step, graded in logged_steps(Path(RunStore.at_run_folder(config).rollouts), None):
        done += longest_piece([*graded.traces, *graded.waiting], step - 1)
        iterations[step] = done
        lengths += [len(trace.completion) for trace in graded.traces]
    steps = [line for line in lines if line["step"]]
    carried = [line.get("rollout/carried_fraction", 0.0) for line in steps]
    used = [line["perf/slots_used"] for line in steps if "perf/slots_used" in line]
    return {
        "accuracy": curve,
        "decode_iterations": {step: iterations[step] for step in curve},
        "gain_points": round(100 * (curve[max(curve)] - curve[0]), 1),
        "tokens": [round(float(np.mean(lengths)), 1), *np.quantile(lengths, [0.5, 0.9, 0.99, 1.0]).tolist()],
        "carried_fraction": round(float(np.mean(carried)), 3),
        "slots_used": round(float(np.mean(used)), 3),
        **off_policy(lines),
    }


def beside_off(runs: list[dict[str, Any]]) -> None:
    """Says of each run what the one without a schedule had reached after as many decode iterations."""
    for one in runs:
        for other in runs:
            if other["task"] == one["task"] and other["seed"] == one["seed"] and not other["staleness"]:
                at = max(map(int, one["decode_iterations"].values()))
                done = list(other["decode_iterations"].values())
                reached = np.interp(at, done, list(other["accuracy"].values()))
                one["off_after_as_many_iterations"] = round(float(reached), 4)
                one["iterations_of_off"] = round(at / max(done), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tasks", default=",".join(LONGEST))
    parser.add_argument("--folder", type=Path, required=True, help="where models, rows and runs are kept")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: the demo's)")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    done = {(one["task"], one["seed"], one["staleness"], one["part"]) for one in runs}
    for task in options.tasks.split(","):
        for seed in map(int, options.seeds.split(",")):
            base = config_of(task, seed, folder)
            if options.steps:
                base = c.override(base, [f"run.max_steps={options.steps}"])
            for ahead, part in SCHEDULES:
                if (task, seed, ahead, part) in done:
                    continue
                config = scheduled(base, task, ahead, part, folder)
                one_process.run(config)
                about = {"task": task, "seed": seed, "staleness": ahead, "part": part}
                about["tokens_per_step"] = config.rollout.tokens_per_step
                runs.append(about | measured(config))
                print(json.dumps(runs[-1]), flush=True)
                beside_off(runs)
                result = {
                    "machine": f"{os.cpu_count()} cores, {processor()}",
                    "tokens": "of a completion: mean, median, 90%, 99%, longest",
                    "longest": LONGEST,
                    "runs": runs,
                }
                options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
