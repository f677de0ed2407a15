"""A fault drill of a run whose samples come from rollout workers, held against the colocated run.

    python -m tests.fleet.drill [--seconds 240] [--steps 40] [--staleness 2] [--seed 0] [--json FILE]

The trainer, two workers and an S3 server on loopback are real; the model is tiny. From the first step on one
of these strikes every few seconds, for `--seconds`: SIGKILL of a worker or SIGTERM to it (another takes its
place under a new name), a worker stopped for longer than `fleet.lost_s`, SIGKILL of the trainer (the platform
starts it again), the store's network cut for some seconds, forged objects in the run's folder. Then the run
comes to its end. Exits with 1 if completions, metrics or weights differ in a single bit from those of the
colocated run, if a worker outlives the run, or if the bucket keeps more than the newest checkpoints need.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import servers
from tests.fleet.jobs import FleetJob, WorkerProcess, assert_same_run
from tests.loops.drill import configure, show
from tests.loops.jobs import Job
from trainer import config as c
from trainer.exit_codes import EXIT_PREEMPTED, RECOVER_EXIT_CODES
from trainer.observe.history import read_history
from trainer.storage.storage import Storage

FAULTS = (
    "worker killed",
    "worker noticed",
    "worker stopped",
    "trainer killed",
    "network cut",
    "objects forged",
)
WEIGHTS = (4, 2, 2, 1, 2, 2)
WORKERS = 2
LOST_S = 8.0
LONG_S = 300
"""A process that lives for less is still loading for much of its life: its memory and files say nothing."""
MOST_VERSIONS = 24
"""Versions that the bucket may hold: two checkpoints, two steps apart, and what is behind them while the next
is committed."""


@dataclass
class FleetDrill:
    """One run with its faults."""

    job: FleetJob
    relay: servers.Proxy
    server: servers.S3Server
    store: Storage
    rng: random.Random
    strikes: list[dict[str, Any]] = field(default_factory=list)
    names: int = 0
    starts: int = 0
    ended: list[WorkerProcess] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    """The most objects that each folder of the run's `fleet` was seen with."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """MiB of each process over its life, by name."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Open files of each process over its life."""

    def run(self, seconds: float) -> None:
        """Strikes for so long, then waits for the end of the run and of its workers."""
        self._trainer()
        self._refill()
        while self.job.progress().get("step", 0) < 1:
            self._live(1.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.job.process and self.job.process.poll() is None:
            self._live(self.rng.uniform(1.0, 8.0))
            self._strike()
        self._refill()
        self._live(1.0, until_end=True)
        for worker in self.job.workers.values():
            assert worker.wait(180) == 0, worker.said()[-3000:]

    def _trainer(self) -> None:
        self.starts += 1
        self.job.start()

    def _refill(self) -> None:
        """A platform that brings every worker back that has gone."""
        for name, worker in list(self.job.workers.items()):
            if worker.process.poll() is not None:
                self.ended.append(self.job.workers.pop(name))
        while len(self.job.workers) < WORKERS:
            self.names += 1
            self.job.add_worker(f"w{self.names}")

    def _live(self, seconds: float, until_end: bool = False) -> int:
        """Lets them work; the exit code of the trainer where it has ended."""
        end = time.monotonic() + seconds
        assert self.job.process
        while (code := self.job.process.poll()) is None and (until_end or time.monotonic() < end):
            self._look()
            if not until_end:
                self._refill()
            time.sleep(1.0)
        if code is None or code == 0:
            return code or 0
        assert code in RECOVER_EXIT_CODES or code < 0, f"exit code {code}\n{self.job.told()}"
        self._trainer()
        return self._live(seconds, until_end)

    def _look(self) -> None:
        """Counts what must stay flat."""
        with contextlib.suppress(Exception):  # the listing of a server that writes meanwhile
            counts = Counter(key.partition("/")[0] for key, _ in self.store.list())
            for folder, number in counts.items():
                self.objects[folder] = max(self.objects.get(folder, 0), number)
        living = {name: worker.process.pid for name, worker in self.job.workers.items()}
        if self.job.process and self.job.process.poll() is None:
            living[f"trainer {self.starts}"] = self.job.process.pid
        for name, pid in living.items():
            with contextlib.suppress(OSError, ValueError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory.setdefault(name, []).append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
                self.files.setdefault(name, []).append(len(os.listdir(f"/proc/{pid}/fd")))

    def _strike(self) -> None:
        if not self.job.process or self.job.process.poll() is not None:
            return
        (fault,) = self.rng.choices(FAULTS, WEIGHTS)
        state = self.job.progress()
        self.strikes.append({"fault": fault, "step": state.get("step", 0), "phase": state.get("phase", "")})
        print(f"{len(self.strikes)}: {fault} in step {state.get('step', 0)}", flush=True)
        names = sorted(self.job.workers)
        ready = [name for name in names if "ready after" in self.job.workers[name].said()]
        worker = self.job.workers[self.rng.choice(ready or names)]  # those that load are worth little
        match fault:
            case "worker killed":
                worker.signal(signal.SIGKILL)
                worker.process.wait()
            case "worker noticed":
                worker.signal(signal.SIGTERM)
                self._live(2.0)
            case "worker stopped":
                worker.signal(signal.SIGSTOP)
                self._live(LOST_S + 2)
                worker.signal(signal.SIGCONT)
            case "trainer killed":
                self.job.kill()
                self._trainer()
            case "network cut":
                self.relay.cut()
                self._live(self.rng.uniform(1.0, 5.0))
                self.relay.restore()
            case "objects forged":
                self._forge()

    def _forge(self) -> None:
        """Somebody who may write to the bucket and has no key."""
        with contextlib.suppress(FileNotFoundError):
            there = [key for key, _ in self.store.list()]
            for key in self.rng.sample(there, min(6, len(there))):
                if key.startswith(("workers/", "mail/", "samples/")):
                    self.store.put_bytes(key, os.urandom(300))
            self.store.put_bytes(f"workers/stranger{self.rng.randrange(3)}.json", os.urandom(300))


def play(folder: Path, seconds: float, steps: int, staleness: int, seed: int) -> dict[str, Any]:
    """The whole drill. Raises AssertionError on any difference or left-over."""
    base = configure(folder, steps, 1, False, staleness)
    base = c.override(
        base, ["logging.keep_rollouts=true", "evaluation.every_steps=8", "evaluation.max_samples=8"]
    )
    with servers.rclone(folder / "store") as server, servers.proxy(server.port) as relay:
        config = replace(base, run=replace(base.run, dir=str(folder / "job/run")))
        env = servers.s3_environment(relay.port) | {"SPOTRL_NOTICE_S": "5"}
        job = FleetJob(config, folder / "job", "s3://bucket/runs", env, [f"fleet.lost_s={LOST_S}"])
        store = Storage(f"s3://bucket/runs/{config.run_id}/fleet", env=server.env)
        drill = FleetDrill(job, relay, server, store, random.Random(seed))
        calm = Job(base, folder / "calm").start()  # beside the other, which takes longer
        begun = time.monotonic()
        try:
            drill.run(seconds)
            wall_s = time.monotonic() - begun
            assert calm.wait(900) == 0, calm.tail()
        finally:
            calm.kill()
            job.kill()
            job.end_workers()
        left = Counter(key.partition("/")[0] for key, _ in store.list())
    codes = Counter(worker.process.returncode for worker in drill.ended)
    assert_same_run(calm, job, but=("mismatch/",))
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGTERM, EXIT_PREEMPTED}, codes
    assert drill.objects["weights"] <= 2 * MOST_VERSIONS, drill.objects
    last = read_history(job.run_dir)[-1]
    lives = {name: values for name, values in drill.memory.items() if len(values) > LONG_S}
    faults = Counter(strike["fault"] for strike in drill.strikes)
    memory = {name: _ends(values) for name, values in lives.items()}
    files = {name: _ends(drill.files[name]) for name in lives}
    counts = ("units", "late", "again", "lost", "doubled", "refused", "forged")
    return {
        "steps": steps,
        "staleness": staleness,
        "faults": {name: faults[name] for name in FAULTS},
        "seconds": round(wall_s),
        "starts_of_the_trainer": drill.starts,
        "workers_started": drill.names,
        "workers_ended_by_code": dict(sorted(codes.items())),
        "equal_to_the_colocated_run": True,
        "objects_at_most": drill.objects,
        "objects_at_the_end": dict(left),
        "counts_of_the_last_attempt": {name: last[f"fleet/{name}"] for name in counts},
        "memory_mib_second_and_last_tenth": memory,
        "open_files_second_and_last_tenth": files,
        "strikes": drill.strikes,
    }


def _ends(values: list[Any]) -> list[int]:
    """Mean of the second tenth of a process's life, when it has loaded, and of the last."""
    tenth = max(1, len(values) // 10)
    second, last = values[tenth : 2 * tenth], values[-tenth:]
    return [round(sum(part) / len(part)) for part in (second, last)]


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="strike for so long")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=2, help="steps that are sampled ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything here, to look at")
    parser.add_argument("--json", type=Path, help="where the figures go")
    a = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = a.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-drill-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = play(folder, a.seconds, a.steps, a.staleness, a.seed)
        except AssertionError as error:
            print(f"the drill failed: {error}", file=sys.stderr)
            return 1
    show(figures, a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
