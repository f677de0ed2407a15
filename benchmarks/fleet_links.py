"""A trainer and three rollout workers on hosts of their own, whose links to the store have a stated rate.

    python -m benchmarks.fleet_links    # as root; a quarter of an hour; adds to fleet_links.json

Five hosts are namespaces of this machine (tests/lab): the trainer, three workers, and an S3 server, which is
all that the others speak with. The model has 40 million bf16 weights; steps are on policy, so that every
worker waits for the weights of every step. Bytes are read from each host's network card. The plan's figures
are the bytes of a patch at this learning rate, and, from the run without a limit, seconds: a patch goes out
once and is fetched by every worker through the store's one link.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from examples.demo import shapes, tiny_model
from recipes.plan.fleet_cost import patch_rate
from tests.lab import hosts
from tests.loops.jobs import REWARD
from tests.servers import KEY, SECRET
from trainer import config as c
from trainer.config.run_store import RunStore
from trainer.hardware.model_shapes import from_config
from trainer.observe.history import read_history

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks/fleet_links.json"
WORKERS = ("w1", "w2", "w3")
NAMES = ("trainer", *WORKERS, "store")
RATES = (0, 200, 20)
"""Mbit/s of each host's link; 0: as fast as this machine is."""
PORT = 9000
HEADER = 1.03
"""Bytes on the wire per byte sent: headers of packets of 1,500 bytes, and acknowledgements."""
WARM_UP = 2
"""First steps, which are not counted."""
FLEET_KEY = "a secret of the lab, long enough"


@dataclass(frozen=True)
class Bytes:
    """What a host's card has passed on."""

    received: int
    sent: int


@dataclass(frozen=True)
class Measured:
    """One run: means over its steps after the first ones, medians of seconds."""

    megabit: int
    workers: int
    step_s: float
    wait_s: float
    """The trainer's wait for samples in a step."""
    publish_s: float
    """The sending of weights in a step."""
    patch_bytes: float
    """What a step changes of the weights, as the trainer counts it."""
    trainer_sent_bytes: float
    """By the trainer's card in a step: weights, units, marks, and requests for samples."""
    worker_received_bytes: float
    """By one worker's card in a step: weights, units, and answers to what it asks every second."""
    store_sent_bytes: float
    completions_by_worker: dict[str, float]
    """In the whole run."""


def settings(folder: Path, run: Path, steps: int) -> c.RunConfig:
    """The trainer's configuration. folder: with model and rows."""
    return c.RunConfig(
        run=c.Run(id="links", name="links", dir=str(run), max_steps=steps),
        model=c.Model(path=str(folder / "model"), dtype="bf16", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(folder / "data"), prompt_max_tokens=300),
        rollout=c.Rollout(prompts_per_step=6, samples_per_prompt=4, max_tokens=16, kv_cache_gib=0.25),
        algorithm=c.Algorithm(micro_batch_tokens=800, kl_coef=0.0),
        optimizer=c.Optimizer(learning_rate=1e-6),
        rewards=c.Rewards(function=f"{folder / 'reward.py'}:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=10**6, export_hf="never", remote="s3://bucket/runs"),
        placement=c.Placement(workers_per_node=1, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
        fleet=c.Fleet(workers="only", unit_prompts=2),
    )


def prepare(folder: Path, size: tiny_model.Size) -> None:
    """Model, rows, and a reward that gives every step a gradient."""
    tiny_model.build(folder / "model", 0, size)
    shapes.prepare(folder / "data", 96, 16, seed=0)
    (folder / "reward.py").write_text(REWARD)


def cards(lab: hosts.Lab) -> dict[str, Bytes]:
    """The counters of every host's card, now."""
    found = {}
    for name, host in lab.hosts.items():
        text = Path(f"/proc/{host.pid}/net/dev").read_text()
        card = next(line for line in text.splitlines() if "eth1:" in line)
        numbers = card.split(":")[1].split()
        found[name] = Bytes(int(numbers[0]), int(numbers[8]))
    return found


def played(config: c.RunConfig, lab: hosts.Lab, scratch: Path) -> dict[int, dict[str, Bytes]]:
    """Runs to the end; the cards' counters when each step's line was written. Raises RuntimeError with the
    last words of who failed."""
    path = scratch / "run.yaml"
    path.write_text(c.dump(config))
    (scratch / "store/bucket").mkdir(parents=True)
    env = {
        "AWS_ENDPOINT_URL": f"http://{lab.hosts['store'].address}:{PORT}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "SPOTRL_FLEET_KEY": FLEET_KEY,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
    }
    rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    serve = [rclone, "serve", "s3", str(scratch / "store"), "--addr", f":{PORT}", "--config", os.devnull]
    store = lab.hosts["store"].start([*serve, "--auth-key", f"{KEY},{SECRET}"], scratch / "store.log")
    trainer = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(path)]
    started = {"trainer": lab.hosts["trainer"].start(trainer, scratch / "trainer.log", env)}
    root = RunStore.in_bucket(config.checkpoint.remote, config.run_id).root
    for name in WORKERS:
        worker = [sys.executable, "-m", "trainer.fleet.worker", "--run", root, "--name", name]
        started[name] = lab.hosts[name].start(worker, scratch / f"{name}.log", env)
    counters = watch(started, config, lab)
    if any(process.wait(120) for process in started.values()) or store.poll() is not None:
        logs = [(scratch / f"{name}.log").read_text()[-2000:] for name in NAMES]
        raise RuntimeError("\n".join(logs))
    return counters


def watch(
    started: Mapping[str, subprocess.Popen[bytes]], config: c.RunConfig, lab: hosts.Lab
) -> dict[int, dict[str, Bytes]]:
    """The cards' counters when each step's line was written; ends with the trainer, or with who fails."""
    found: dict[int, dict[str, Bytes]] = {}
    while started["trainer"].poll() is None and not any(one.poll() for one in started.values()):
        done = [line["step"] for line in read_history(config.run.dir)]
        if done and done[-1] not in found:
            found[done[-1]] = cards(lab)
        time.sleep(0.05)
    return found


def measure(folder: Path, megabit: int, steps: int) -> Measured:
    """One run."""
    with tempfile.TemporaryDirectory() as tmp, hosts.Lab(NAMES, Path(tmp) / "lab") as lab:
        if megabit:
            lab.shape(megabit)
        config = settings(folder, Path(tmp) / "run", steps)
        counters = played(config, lab, Path(tmp))
        return summary(config, counters, megabit)


def summary(config: c.RunConfig, counters: Mapping[int, Mapping[str, Bytes]], megabit: int) -> Measured:
    """What a run came to."""
    lines = read_history(config.run.dir)
    steps = [line for line in lines if line["step"] > WARM_UP]
    first, last = min(step for step in counters if step >= WARM_UP), max(counters)

    def per_step(name: str, way: str) -> float:
        passed = getattr(counters[last][name], way) - getattr(counters[first][name], way)
        return passed / (last - first)

    def median(name: str) -> float:
        return statistics.median(line[name] for line in steps)

    roster = json.loads((Path(config.run.dir) / "fleet.json").read_text())["workers"]
    received = [per_step(name, "received") for name in WORKERS]
    return Measured(
        megabit=megabit,
        workers=len(WORKERS),
        step_s=median("time/step_s"),
        wait_s=median("fleet/wait_s"),
        publish_s=median("fleet/publish_s"),
        patch_bytes=statistics.fmean(line["fleet/patch_mib"] for line in steps) * 2**20,
        trainer_sent_bytes=per_step("trainer", "sent"),
        worker_received_bytes=statistics.fmean(received),
        store_sent_bytes=per_step("store", "sent"),
        completions_by_worker={row["worker"]: row["completions"] for row in roster},
    )


def planned(folder: Path, found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Each run beside the plan's bytes of a patch, and the seconds of a step that follow from the run without
    a limit and the bytes that were sent."""
    shape = from_config(json.loads((folder / "model/config.json").read_text()))
    patch = shape.parameters * patch_rate(settings(folder, folder, 1))
    free = next(one for one in found if not one.megabit)
    rows = []
    for one in found:
        step_s = free.step_s
        if one.megabit:
            step_s += (1 + one.workers) * one.patch_bytes * HEADER / (one.megabit * 1e6 / 8)
        row = asdict(one) | {"planned_patch_bytes": round(patch), "planned_step_s": step_s}
        rows.append({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s; 0 comes first")
    parser.add_argument("--json", type=Path, default=OUT)
    a = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(why)
    known = json.loads(a.json.read_text())["runs"] if a.json.exists() else []
    found = []
    for run in known:
        found.append(Measured(**{one.name: run[one.name] for one in fields(Measured)}))
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        prepare(folder, "medium")
        there = {one.megabit for one in found}
        for megabit in [rate for rate in a.rates if rate not in there]:
            found.append(measure(folder, megabit, a.steps))
            print(found[-1], flush=True)
            git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
            shape = from_config(json.loads((folder / "model/config.json").read_text()))
            about = {"cpus": os.cpu_count(), "processor": processor(), "revision": git.stdout.strip()}
            about |= {"parameters": shape.parameters, "steps": a.steps}
            a.json.write_text(json.dumps(about | {"runs": planned(folder, found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
