"""From the death of a node to the next committed step on new machines, part by part, with a store behind slow
links.

    python -m benchmarks.recovery [--rounds 3] [--megabit 200]    # as root; 4 minutes a round

Four hosts (namespaces of this machine, tests/lab) train the demo's model, one rank each, from the node
launcher up; a fifth serves S3. In every round one host loses its power in the middle of a step; the launchers
of the others end; then four new hosts start with empty folders, as an engine that has rented again would
start them. So the clock holds all but the engine's own time and the set-up of the environment.
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
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from data_prep.write.shards import write_dataset
from examples.demo import tiny_model
from tests.conftest import make_rows
from tests.lab import hosts
from tests.loops.jobs import REWARD
from tests.servers import KEY, SECRET, s3_environment
from trainer import config as c
from trainer.observe.start_clock import PARTS
from trainer.system.exit_codes import EXIT_NODE_LOST

OUT = Path(__file__).with_name("recovery.json")
NODES = 4
PORT = 9000
BEFORE_KILL = 2
NAMES = [f"h{number}" for number in range(1, NODES + 1)]


def settings(folder: Path) -> c.RunConfig:
    """A run that saves every step; its folder is each host's own."""
    return c.RunConfig(
        run=c.Run(name="recovery", id="recovery", dir=str(folder / "run"), max_steps=10_000),
        model=c.Model(path=str(folder / "model"), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(folder / "data"), prompt_max_tokens=300, episodes=10_000),
        rollout=c.Rollout(
            prompts_per_step=8, samples_per_prompt=4, max_tokens=16, kv_cache_gib=0.25, sleep_level=0
        ),
        algorithm=c.Algorithm(micro_batch_tokens=400, kl_coef=0.01),
        optimizer=c.Optimizer(learning_rate=1e-3),
        rewards=c.Rewards(function=f"{folder}/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=1, export_hf="never", remote="s3://bucket"),
        placement=c.Placement(nodes=NODES, workers_per_node=1, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


class Cluster:
    """Four new machines that run the job, and the store."""

    def __init__(self, folder: Path, megabit: int) -> None:
        self.folder = folder
        self.scratch = Path(tempfile.mkdtemp(prefix="m"))  # a short name, for Ray's sockets below it
        self.lab = hosts.Lab([*NAMES, "store"], self.scratch, private=[str(folder / "run")])
        self.lab.shape(megabit)
        store = self.lab.hosts["store"]
        serve = [
            str(Path(sys.executable).with_name("rclone")),
            "serve",
            "s3",
            str(folder / "store"),
            "--config",
            os.devnull,
            "--addr",
            f"{store.address}:{PORT}",
            "--auth-key",
            f"{KEY},{SECRET}",
        ]
        store.start(serve, self.scratch / "store.log")
        env = s3_environment(PORT) | {"AWS_ENDPOINT_URL": f"http://{store.address}:{PORT}"}
        env["SPOTRL_PEERS"] = ",".join(self.lab.hosts[name].address for name in NAMES)
        command = [sys.executable, "-m", "trainer.node", "--config", str(folder / "run.yaml")]
        self.processes: dict[str, subprocess.Popen[bytes]] = {
            name: self.lab.hosts[name].start(command, self.log(name), env | {"SPOTRL_NODE_RANK": str(rank)})
            for rank, name in enumerate(NAMES)
        }

    def log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def said(self) -> str:
        """The launchers' last words."""
        return "\n".join(self.log(name).read_text()[-1500:] for name in NAMES)

    def metrics(self) -> list[dict[str, Any]]:
        """What the head has logged; nothing before it has."""
        try:
            text = self.lab.hosts[NAMES[0]].run("cat", str(self.folder / "run/metrics.jsonl"))
        except RuntimeError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    def committed_after(self, step: int, timeout_s: float = 400.0) -> int:
        """Waits for a step beyond `step` in the store and returns it. Raises RuntimeError."""
        end = time.monotonic() + timeout_s
        while (newest := committed(self.folder)) <= step:
            if ended := [name for name, process in self.processes.items() if process.poll() is not None]:
                raise RuntimeError(f"{ended[0]} has ended:\n" + self.said())
            if time.monotonic() > end:
                raise RuntimeError(f"no step after {timeout_s:.0f} s:\n" + self.said())
            time.sleep(0.05)
        return newest

    def close(self) -> None:
        self.lab.__exit__()
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def committed(folder: Path) -> int:
    """Newest step in the store; 0: none."""
    found = (folder / "store/bucket/recovery/checkpoints").glob("step-*/*/manifest.json")
    return max((int(path.parts[-3].removeprefix("step-")) for path in found), default=0)


def measure(cluster: Cluster, victim: str, megabit: int) -> tuple[Cluster, dict[str, float]]:
    """Ends a host, starts new ones; the new ones, and seconds by part."""
    at = committed(cluster.folder)
    began = time.monotonic()
    cluster.lab.hosts[victim].kill()
    for name, process in cluster.processes.items():
        code = process.wait(120)
        if name != victim and code != EXIT_NODE_LOST:
            raise RuntimeError(f"{name} ended with {code}:\n" + cluster.said())
    ended = time.monotonic()
    cluster.close()
    fresh = Cluster(cluster.folder, megabit)
    launched = time.monotonic()
    at = max(at, committed(cluster.folder))
    fresh.committed_after(at)
    done = time.monotonic()
    while not (
        first := next(
            (line for line in fresh.metrics() if line["step"] > at and "perf/start_s" in line), None
        )
    ):
        time.sleep(0.05)
    parts = {part: first[key] for part, key in PARTS.items()}
    found = {"others ended": ended - began, "new machines": launched - ended} | parts
    found["step"] = first["time/step_s"]
    found["commit"] = done - began - sum(found.values())
    return fresh, {name: round(seconds, 2) for name, seconds in found.items()} | {
        "total": round(done - began, 2)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabit", type=int, default=200, help="Mbit/s of every host's link")
    arguments = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(why)
    folder, rounds = Path(tempfile.mkdtemp(prefix="recovery-")), []
    cluster = None
    try:
        tiny_model.build(folder / "model", 0, "tiny")
        write_dataset(folder / "data", "recovery", {"train": make_rows("train", 64)}, {})
        (folder / "reward.py").write_text(REWARD)
        (folder / "run").mkdir()
        (folder / "store/bucket").mkdir(parents=True)
        (folder / "run.yaml").write_text(c.dump(settings(folder)))
        cluster = Cluster(folder, arguments.megabit)
        for number in range(arguments.rounds):  # the last host, the one before it, ..., the head
            cluster.committed_after(committed(folder) + BEFORE_KILL)
            victim = NAMES[-1 - number % NODES]
            cluster, found = measure(cluster, victim, arguments.megabit)
            rounds.append({"victim": victim} | found)
            print(rounds[-1], flush=True)
            write(rounds, arguments.megabit)
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def write(rounds: list[dict[str, Any]], megabit: int) -> None:
    """The file, after every round."""
    median = {
        name: round(statistics.median(one[name] for one in rounds), 2)
        for name in rounds[0]
        if name != "victim"
    }
    machine = {"cpus": os.cpu_count(), "processor": processor()}
    setting = {"nodes": NODES, "ranks": NODES, "megabit": megabit}
    OUT.write_text(
        json.dumps({"machine": machine, "setting": setting, "median_s": median, "rounds": rounds}, indent=1)
    )


if __name__ == "__main__":
    main()
