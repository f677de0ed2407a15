"""A trainer and its rollout workers as real processes that meet in a bucket alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tests.loops.jobs import ROOT, Job
from trainer.checkpoint.manifest import code_fingerprint
from trainer.config import RunConfig, override
from trainer.fleet.fleet_records import AboutRun, sampling_packages


def about_run(attempt: str) -> AboutRun:
    """What a head says of a run that this code trains and nobody configured."""
    packages = sampling_packages()
    return AboutRun(
        attempt=attempt, config={}, code=code_fingerprint(), packages=packages, data="", layout=[]
    )


KEY = "a secret of the tests, long enough"


class WorkerProcess:
    """One `python -m trainer.fleet.worker`."""

    def __init__(
        self,
        root: str,
        folder: Path,
        name: str,
        env: Mapping[str, str],
        more: tuple[str, ...] = (),
        module: str = "trainer.fleet.worker",
        before: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [*before, sys.executable, "-m", module, "--run", root, "--name", name]
        command += ["--poll", "0.1", *more]
        own = {"PYTHONPATH": str(ROOT), "SPOTRL_METADATA": "off", "SPOTRL_FLEET_KEY": KEY}
        own["SPOTRL_NOTICE_FILE"] = str(folder / f"{name}.notice")
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | dict(env) | own, stdout=log, stderr=log
            )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"{self.name} goes on\n{self.log.read_text()[-3000:]}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def other_ranks(pid: int) -> list[int]:
    """The ranks that a worker's process has started, in order."""
    found = [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if b"trainer.fleet.engine_ranks" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return sorted(found)


class FleetJob(Job):
    """A trainer with `fleet.workers=only`, and its workers."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        bucket: str,
        env: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
        module: str = "trainer.loops.grpo",
        before: Sequence[str] = (),
    ) -> None:
        """more: further options. module: the loop. before: what the command lines of trainer and workers
        begin with, as to run them on another host."""
        self.folder, self.bucket = folder, bucket
        self.store_env = dict(env or {})
        fleet = ["fleet.workers=only", "fleet.unit_prompts=2", "fleet.lost_s=15"]
        config = override(config, [*fleet, f"checkpoint.remote={bucket}", *more])
        super().__init__(config, folder, self.store_env | {"SPOTRL_FLEET_KEY": KEY}, module, before=before)
        self.workers: dict[str, WorkerProcess] = {}

    def add_worker(
        self, name: str, more: tuple[str, ...] = (), module: str = "trainer.fleet.worker", **env: str
    ) -> WorkerProcess:
        root = f"{self.bucket}/{self.config.run_id}"
        folder = self.folder / "workers"
        worker = WorkerProcess(root, folder, name, self.store_env | env, more, module, self.before)
        self.workers[name] = worker
        return worker

    def end_workers(self) -> None:
        for worker in self.workers.values():
            worker.signal(signal.SIGKILL)
            worker.process.wait()

    def told(self) -> str:
        """The ends of all logs."""
        logs = [worker.said()[-1500:] for worker in self.workers.values()]
        return "\n---\n".join([self.tail(), *logs])

    def finish(self, timeout_s: float = 900.0) -> None:
        """Waits for the run and for all of its workers that live."""
        code = self.wait(timeout_s)
        assert code == 0, self.told()
        for worker in self.workers.values():
            if worker.process.poll() is None:
                assert worker.wait() == 0, worker.said()


def without_workers(config: RunConfig, folder: Path, deadline_s: int = 900) -> Job:
    """The run whose own engines sample, from its start to its end."""
    job = Job(config, folder).start()
    try:
        assert job.wait(deadline_s) == 0, job.tail()
    finally:
        job.kill()
    return job


def rollouts(job: Job) -> dict[str, dict[str, np.ndarray]]:
    """All that was sampled and graded, by step."""
    found = {}
    for path in sorted((job.run_dir / "rollouts").glob("step-*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            found[path.stem] = {name: archive[name] for name in archive.files if name != "about"}
    return found


def final_weights(job: Job) -> dict[str, Any]:
    """fp32 weights and Adam's moments of the newest checkpoint, by file and key."""
    newest = sorted((job.run_dir / "checkpoints").glob("step-*"))[-1]
    found = {}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                found[f"{newest.name}/{path.name}/{key}"] = file.get_tensor(key)
    return found


def assert_same_run(one: Job, other: Job, but: tuple[str, ...] = (), since: int = 1) -> dict[str, int]:
    """The two runs sampled, graded and computed the same, bit for bit. Returns how much was compared. but:
    beginnings of the names of metrics that only one of them has. since: first step whose completions the
    other one's disk holds."""
    ours, theirs = rollouts(one), rollouts(other)
    ours = {name: arrays for name, arrays in ours.items() if int(name[5:]) >= since}
    assert ours.keys() == theirs.keys() and ours
    for step, arrays in ours.items():
        assert arrays.keys() == theirs[step].keys()
        for name, values in arrays.items():
            assert np.array_equal(values, theirs[step][name]), (step, name)
    metrics, others = one.metrics(), other.metrics()
    assert [line["step"] for line in metrics] == [line["step"] for line in others]
    for line, against in zip(metrics, others, strict=True):
        same = {name for name in line.keys() | against.keys() if line.get(name) == against.get(name)}
        apart = (line.keys() | against.keys()) - same
        assert not {name for name in apart if not name.startswith(("node/", *but))}, (line["step"], apart)
    weights, other_weights = final_weights(one), final_weights(other)
    assert weights.keys() == other_weights.keys() and weights
    for key, values in weights.items():
        assert bool((values == other_weights[key]).all()), key
    return {
        "steps_of_completions": len(ours),
        "arrays_of_completions": sum(map(len, ours.values())),
        "metrics": sum(map(len, metrics)),
        "tensors_of_the_last_checkpoint": len(weights),
    }
