"""A fault drill of a run whose samples come from rollout workers, held against the colocated run.

    python -m tests.fleet.drill [--faults 100] [--seconds 2400] [--steps 100] [--staleness 2] [--json FILE]

The trainer, two workers and an S3 server on loopback are real; the model is tiny. From the first step on
`--faults` of these strike within about `--seconds`: SIGKILL of a worker or SIGTERM to it (another takes its
place under a new name), a worker stopped for longer than `fleet.lost_s`, SIGKILL of the trainer (the platform
starts it again), the store's network cut for some seconds, forged objects in the run's folder. Then the run
comes to its end. The first worker is stopped and cut off as the others are, but never ended: its memory and
its open files are those of the whole drill. Exits with 1 if completions, metrics or weights differ in a
single bit from those of the colocated run, if a worker outlives the run, or if the bucket keeps more than the
newest checkpoints need.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import servers
from tests.fleet.drill_sight import Sight
from tests.fleet.fault_run import FAULTS, READY, FaultRun
from tests.fleet.jobs import WorkerProcess, assert_same_run
from tests.loops.drill import configure, show
from tests.loops.jobs import Job
from trainer import config as c
from trainer.observe.history import read_history
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_PREEMPTED

WEIGHTS = {
    "worker killed": 4,
    "worker noticed": 2,
    "worker stopped": 2,
    "trainer killed": 1,
    "network cut": 2,
    "objects forged": 2,
}
"""How often each of the faults is drawn, of 13."""
WORKERS = 2
LASTING = "w1"
"""The worker that is never ended."""
MOST_VERSIONS = 24
"""Versions that the bucket may hold: two checkpoints, two steps apart, and what is behind them while the next
is committed."""


class FleetDrill(FaultRun):
    """A run with faults at random."""

    pause_s = 1.0

    def __init__(self, sight: Sight, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sight = sight
        self.strikes: list[dict[str, Any]] = []
        self.ended: list[WorkerProcess] = []

    def run(self, faults: int, seconds: float) -> None:
        """Strikes as often within this time, then waits for the end of the run and of its workers."""
        self.start_trainer()
        self.look()
        self.live(until=lambda: self.job.progress().get("step", 0) >= 1)
        begun = time.monotonic()
        while len(self.strikes) < faults and self.job.process and self.job.process.poll() is None:
            due = begun + (len(self.strikes) + self.rng.random()) * seconds / faults
            self.live(max(1.0, due - time.monotonic()))
            self.strike()
        self.finish()

    def look(self) -> None:
        """Brings every worker back that has gone, as a platform does, and watches the bucket and the
        processes that are ready."""
        for name, worker in list(self.job.workers.items()):
            if worker.process.poll() is not None:
                self.ended.append(self.job.workers.pop(name))
        while len(self.job.workers) < WORKERS:
            self.add_worker()
        ready = {}
        for name, worker in self.job.workers.items():
            if READY in worker.said():
                ready[name] = [worker.process.pid]
        if self.job.progress().get("step", 0) >= 1:
            ready[f"trainer {self.starts}"] = self.job.pids()
        self.sight.look(ready)

    def strike(self) -> None:
        """Draws a fault, and a worker for it: one that is ready, where there is one."""
        if not self.job.process or self.job.process.poll() is not None:
            return
        (fault,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        state = self.job.progress()
        self.strikes.append({"fault": fault, "step": state.get("step", 0), "phase": state.get("phase", "")})
        print(f"{len(self.strikes)}: {fault} in step {state.get('step', 0)}", flush=True)
        names = [name for name in sorted(self.job.workers) if fault == "worker stopped" or name != LASTING]
        ready = [name for name in names if READY in self.job.workers[name].said()]
        FAULTS[fault].strike(self, self.job.workers[self.rng.choice(ready or names)])


def play(folder: Path, faults: int, seconds: float, steps: int, staleness: int, seed: int) -> dict[str, Any]:
    """The whole drill. Raises AssertionError on any difference or left-over."""
    base = configure(folder, steps, 1, False, staleness)
    base = c.override(
        base, ["logging.keep_rollouts=true", "evaluation.every_steps=8", "evaluation.max_samples=8"]
    )
    with servers.rclone(folder / "store") as server, servers.proxy(server.port) as relay:
        config = replace(base, run=replace(base.run, dir=str(folder / "job/run")))
        store = Storage(f"s3://bucket/runs/{config.run_id}/fleet", env=server.env)
        where = folder / "job", "s3://bucket/runs", server, relay, seed
        drill = FleetDrill(Sight(store), config, *where)
        job = drill.job
        calm = Job(base, folder / "calm").start()  # beside the other, which takes longer
        begun = time.monotonic()
        try:
            drill.run(faults, seconds)
            wall_s = time.monotonic() - begun
            assert calm.wait(900) == 0, calm.tail()
        finally:
            calm.kill()
            job.kill()
            job.end_workers()
        left = Counter(key.partition("/")[0] for key, _ in store.list())
    codes = Counter(worker.process.returncode for worker in [*drill.ended, *job.workers.values()])
    compared = assert_same_run(calm, job, but=("mismatch/",))
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGTERM, EXIT_PREEMPTED}, codes
    most = drill.sight.most_objects()
    assert most["weights"] <= 2 * MOST_VERSIONS, most
    struck = Counter(strike["fault"] for strike in drill.strikes)
    last = read_history(job.run_dir)[-1]
    counts = ("units", "late", "again", "lost", "doubled", "refused", "forged")
    return {
        "steps": steps,
        "staleness": staleness,
        "faults": sum(struck.values()),
        "faults_by_kind": {name: struck[name] for name in WEIGHTS},
        "seconds": round(wall_s),
        "starts_of_the_trainer": drill.starts,
        "workers_started": drill.names,
        "workers_ended_by_code": dict(sorted(codes.items())),
        "equal_to_the_colocated_run": compared,
        "objects_at_most": most,
        "objects_at_the_end": dict(left),
        "counts_of_the_last_attempt": {name: last[f"fleet/{name}"] for name in counts},
        "over_time": drill.sight.figures(),
        "strikes": drill.strikes,
    }


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2400.0, help="strike within so long")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--staleness", type=int, default=2, help="steps that are sampled ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything here, to look at")
    parser.add_argument("--json", type=Path, help="where the figures go")
    a = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = a.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-drill-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = play(folder, a.faults, a.seconds, a.steps, a.staleness, a.seed)
        except AssertionError as error:
            print(f"the drill failed: {error}", file=sys.stderr)
            return 1
    show(figures, a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
