"""Builds the demo's initial model: a tiny Qwen2.5-VL after a short supervised phase on the split `warm`.

    python -m examples.demo.warm_start --data DATA/shapes --out MODELS/demo

It learns the completion format and to read the images, but most of the warm split's solutions reason
correctly and end on a wrong result. Held-out accuracy therefore starts at about the share of correct
solutions; only the reward of GRPO tells right from wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import rich.progress
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from examples.demo import tiny_model
from trainer import config as c
from trainer.config.run_folder import METRICS
from trainer.data.dataset import read_manifest
from trainer.observe.history import last_step
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED
from trainer.system.processes import end_with_parent

BATCH = 64
STEPS = 200
LEARNING_RATE = 2e-3
QUIET = {"RAY_AUTH_MODE": "token"}
"""What Ray would choose by itself, after a warning."""
STAGE = "2. warm-up"
POLL_S = 0.5
SILENT_S = 600.0
"""A step takes a second or two, and the start one minute: a warm-up that writes nothing for so long hangs."""
LOG_LINES = 20
"""Last lines of the log that are shown where the warm-up fails."""


def configuration(
    model: Path, data: str, run_dir: Path, seed: int, steps: int, workers: int, device: Literal["cpu", "cuda"]
) -> c.RunConfig:
    return c.RunConfig(
        method="sft",
        run=c.Run(name="warm-start", dir=str(run_dir), seed=seed, max_steps=steps),
        model=c.Model(path=str(model), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=data, split="warm", prompt_max_tokens=512),
        optimizer=c.Optimizer(learning_rate=LEARNING_RATE, warmup_steps=20, schedule="linear"),
        sft=c.SFT(batch_size=BATCH, max_tokens=512, epochs=100),
        checkpoint=c.Checkpoint(every_steps=50, keep_last=1, export_hf="end"),
        placement=c.Placement(workers_per_node=workers, device=device),
        logging=c.Logging(tensorboard=False),
        guards=c.Guards(entropy_min_share=0.0),  # entropy falls from that of random weights
        rewards=c.Rewards(workers=1),
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit code of the supervised run; if stopped, the next call resumes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="prepared `shapes` dataset")
    parser.add_argument(
        "--out",
        required=True,
        help="where the model goes; it appears when it is whole, and one that is there is kept",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps; 0: random weights")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--device", choices=("cpu", "best"), default="cpu", help="best: a GPU if there is one"
    )
    options = parser.parse_args(arguments)
    device = "cuda" if options.device == "best" and torch.cuda.is_available() else "cpu"
    os.environ.update(QUIET)
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed's own choice, after a warning
    out = Path(options.out)
    if "warm" not in read_manifest(options.data).rows:
        raise c.ConfigError(
            f"{options.data} has no split `warm`: make it again (python -m examples.demo.shapes)"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.partial")
    scratch.mkdir(exist_ok=True)
    with open(scratch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two demos that are started at once
        if out.is_dir():
            return 0
        model = tiny_model.build(scratch / "base", options.seed)
        if options.steps:
            config = configuration(
                model,
                options.data,
                scratch / "run",
                options.seed,
                options.steps,
                1 if device == "cuda" else options.workers,
                device,
            )
            (scratch / "run.yaml").write_text(c.dump(config))
            code = supervised(scratch, options.steps)
            if code:
                return code
            model = scratch / "run" / "hf"
        os.replace(model, out)
        shutil.rmtree(scratch)
    return 0


def supervised(scratch: Path, steps: int) -> int:
    """The supervised run of `scratch/run.yaml`, shown as one line of progress; its log stays in
    `scratch/log.txt`, and the end of it is shown where the run fails. Returns its exit code."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "trainer.loops.sft", "--config", str(scratch / "run.yaml")]
    log, metrics = scratch / "log.txt", scratch / "run" / METRICS
    with log.open("w") as written, Progress(steps) as progress:
        presses: list[int] = []  # a second Ctrl-C may come while the first is answered
        before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        answered = False
        while process.poll() is None:
            silent_s = time.time() - max(path.stat().st_mtime for path in (log, metrics) if path.exists())
            if silent_s > SILENT_S:
                process.kill()
                progress.say(f"the warm-up has written nothing for {silent_s:.0f} s, and is ended")
            if len(presses) > 1:
                process.kill()
            elif presses and not answered:  # the process got the same Ctrl-C, and saves where it stands
                progress.say("stopping the warm-up, which saves first; Ctrl-C again ends it at once")
                answered = True
            progress.show(max(0, last_step(metrics, steps)))
            time.sleep(POLL_S)
        signal.signal(signal.SIGINT, before)
        progress.show(max(0, last_step(metrics, steps)))
    if presses:
        print("stopped in the warm-up: the same command goes on from its last checkpoint", file=sys.stderr)
        return EXIT_INTERRUPTED
    if process.returncode:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]), file=sys.stderr)
    return process.returncode


class Progress:
    """How far the warm-up is: a bar on a terminal, elsewhere a line at every quarter."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.told = 0
        self.bar = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = rich.progress.Progress(*columns)
            self.task = self.bar.add_task(STAGE, total=steps)

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        else:
            print(f"{STAGE}: {self.steps} supervised steps", flush=True)
        return self

    def show(self, step: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=step)
            return
        quarter = 4 * step // self.steps
        if quarter > self.told:
            self.told = quarter
            print(f"{STAGE}: step {step} of {self.steps}", flush=True)

    def say(self, text: str) -> None:
        """Prints a line above the bar, at once."""
        if self.bar:
            self.bar.console.print(text)
        else:
            print(text, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except c.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:
        print("stopped in the warm-up: the same command begins it again", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
