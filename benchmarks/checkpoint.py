"""What checkpoints cost: upload against obstore's raw put, and a run with none, asynchronous and synchronous
ones.

    python -m benchmarks.checkpoint upload    # MB/s to `rclone serve s3` on loopback, paired runs
    python -m benchmarks.checkpoint stall     # the real trainer: 30M parameters, a save every ten steps
    python -m benchmarks.checkpoint           # both

Each part replaces its own section of checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore

from tests import servers
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.observe.history import read_history
from trainer.storage.storage import Storage

RESULT = Path(__file__).with_suffix(".json")
UPLOAD_BYTES, UPLOAD_PAIRS = 128 << 20, 9
EVERY, STEPS = 10, 21
"""Steps between saves, and of a run: two whole intervals after the first step."""


def random_file(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
    return path


def upload(folder: Path) -> dict[str, Any]:
    """Our put (with the note, the look-up before and the size check after) against obstore.put, in turns, in
    memory."""
    import hashlib

    file = random_file(folder / "file", UPLOAD_BYTES)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    pairs = []
    with servers.rclone(folder / "disk") as server:
        store = Storage("s3://bucket/bench", env=server.env)
        raw = store._store
        store.put(file, "warm")
        for number in range(UPLOAD_PAIRS):
            seconds = {}
            for name in ("ours", "raw") if number % 2 else ("raw", "ours"):
                begun = time.perf_counter()
                if name == "ours":
                    store.put(file, f"ours-{number}", sha256=sha256)
                else:
                    obstore.put(raw, f"raw-{number}", file)
                seconds[name] = time.perf_counter() - begun
            pairs.append(seconds)
            store.delete([f"ours-{number}", f"raw-{number}"])
    megabytes = UPLOAD_BYTES / 1e6
    speeds, ratios = [], []
    for pair in pairs:
        speeds.append({name: round(megabytes / seconds, 1) for name, seconds in pair.items()})
        ratios.append(pair["raw"] / pair["ours"])
    return {
        "bytes": UPLOAD_BYTES,
        "pairs": speeds,
        "ours_mb_per_s": round(statistics.median(speed["ours"] for speed in speeds), 1),
        "raw_mb_per_s": round(statistics.median(speed["raw"] for speed in speeds), 1),
        "ours_over_raw": round(statistics.median(ratios), 3),
    }


def run_config(folder: Path) -> c.RunConfig:
    from examples.demo import shapes, tiny_model

    shapes.prepare(folder / "data", 128, 16, seed=0)
    (folder / "reward.py").write_text(REWARD)
    model = tiny_model.build(folder / "model", 0, size="medium")
    return c.RunConfig(
        run=c.Run(name="bench", dir=str(folder / "run"), max_steps=STEPS),
        model=c.Model(path=str(model), dtype="fp32", gradient_checkpointing=False),
        data=c.Data(path=str(folder / "data"), prompt_max_tokens=400),
        rollout=c.Rollout(
            prompts_per_step=4, samples_per_prompt=4, max_tokens=32, kv_cache_gib=0.5, sleep_level=0
        ),
        algorithm=c.Algorithm(kl_coef=0.0),
        optimizer=c.Optimizer(learning_rate=1e-5),
        rewards=c.Rewards(function=f"{folder}/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=EVERY, keep_last=1, keep_last_remote=1, export_hf="never"),
        placement=c.Placement(workers_per_node=1, threads_per_worker=1, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


def stall(folder: Path) -> dict[str, Any]:
    """Seconds of steps 2 to 21 of the same run with saves after 10 and 20: none, asynchronous, synchronous.

    The last step's save does not count: nothing runs beside it. Every run does the same work to the last bit.
    """
    base = run_config(folder)
    figures: dict[str, Any] = {"every_steps": EVERY}
    with servers.rclone(folder / "disk") as server:
        for name, every, asynchronous in (
            ("none", 1000, True),
            ("asynchronous", EVERY, True),
            ("synchronous", EVERY, False),
        ):
            config = replace(
                base,
                run=replace(base.run, id=name, dir=str(folder / name)),
                checkpoint=replace(
                    base.checkpoint, every_steps=every, asynchronous=asynchronous, remote="s3://bucket/runs"
                ),
            )
            job = Job(config, folder / f"job-{name}", server.env).start()
            assert job.wait(1500) == 0, job.tail()
            # A step's line is written before its save: the save of step n shows in the time of step n + 1.
            lines = {line["step"]: line for line in read_history(config.run.dir)}
            times = [lines[step]["time/step_s"] for step in range(2, STEPS + 1)]
            saves = [lines[step].get("time/checkpoint_s", 0.0) for step in range(2, STEPS + 1)]
            figures[name] = {
                "steps_s": round(sum(times), 3),
                "checkpoint_phase_s": round(sum(saves), 3),
                "checkpoint_phase_share": round(sum(saves) / sum(times), 4),
                "median_step_s": round(statistics.median(times), 3),
                "checkpoint_gib": round(lines[STEPS].get("perf/checkpoint_gib", 0.0), 3),
                "save_s": round(lines[STEPS].get("perf/checkpoint_save_s", 0.0), 2),
                "stall_s": round(lines[STEPS].get("perf/checkpoint_stall_s", 0.0), 3),
            }
    for name in ("asynchronous", "synchronous"):
        figures[name]["steps_over_none"] = round(figures[name]["steps_s"] / figures["none"]["steps_s"], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("upload", "stall"))
    part = parser.parse_args().part
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, measure in (("upload", upload), ("stall", stall)):
        if part in (None, name):
            memory = "/dev/shm" if name == "upload" else None  # not what this machine's disk happens to do
            with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=memory) as folder:
                result[name] = measure(Path(folder))
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result[name], indent=1))


if __name__ == "__main__":
    main()
