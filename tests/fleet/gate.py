"""The gate of the fleet with real engines, from nothing in one command: meant for ten minutes on two cores.

    python -m tests.fleet.gate [--json FILE]                  # all of the following
    python -m tests.fleet.gate alone --folder FOLDER          # the runs whose own engines sample
    python -m tests.fleet.gate fleet --folder FOLDER          # the same, sampled by two workers each
    python -m tests.fleet.gate compare --folder FOLDER        # whether they are equal to the last bit

A tiny model of images, real engines, and S3 servers. On policy a worker is killed; one step ahead, with
adapters, the trainer; and two steps ahead trainer and workers are on a host of their own (tests/lab: needs
root), whose cable is pulled for five minutes, in which the other runs go on. Exits with 1 if completions,
log-probabilities, metrics or weights differ in a single bit, or if a worker outlives its run by a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests import servers
from tests.fleet.jobs import FleetJob, assert_same_run, without_workers
from tests.lab import hosts
from tests.loops.drill import configure, show
from tests.loops.jobs import Job
from trainer import config as c
from trainer.observe.history import read_history
from trainer.system.exit_codes import RECOVER_EXIT_CODES

STEPS = 6
PARTS = ("alone", "fleet", "compare")
LATE_S = 60.0
"""Longest time that a worker may outlive its run."""
STRUCK_IN = 3
"""Step in which the fault strikes."""
PORT = 9000
SITE, STORE = "site", "store"
COUNTS = ("units", "late", "again", "lost", "doubled", "refused", "forged")


@dataclass(frozen=True)
class Case:
    """One run, and what happens to it."""

    name: str
    fault: Literal["worker killed", "trainer killed", "network cut"]
    options: tuple[str, ...] = ()


CASES = (
    Case("on-policy", "worker killed"),
    Case("one-ahead-adapters", "trainer killed", ("rollout.staleness=1", "lora.rank=4")),
    Case("two-ahead", "network cut", ("rollout.staleness=2",)),
)


@dataclass(frozen=True)
class Place:
    """Where a run's trainer and workers are, and how they reach the store."""

    env: dict[str, str]
    before: tuple[str, ...] = ()
    """What a command line begins with to run there."""
    lab: hosts.Lab | None = None
    """The network in between, where it can be cut."""


def config_of(folder: Path, case: Case, part: str) -> c.RunConfig:
    """A case's run."""
    options = [
        f"run.dir={folder / part / case.name / 'run'}",
        f"run.id={case.name}",
        "evaluation.every_steps=4",
        "evaluation.max_samples=6",
        "logging.keep_rollouts=true",
    ]
    return c.override(c.load(folder / "base.yaml"), [*options, *case.options])


def alone(folder: Path, cases: Sequence[Case]) -> None:
    """The runs whose own engines sample, one after the other. Raises AssertionError."""
    for case in cases:
        began = time.monotonic()
        without_workers(config_of(folder, case, "alone"), folder / "alone" / case.name)
        print(f"alone: {case.name}: {time.monotonic() - began:.0f} s", flush=True)


def fleet(folder: Path, cases: Sequence[Case], cut_s: float) -> None:
    """The same runs fed by workers; what happened goes into `fleet.json`. Raises AssertionError."""
    cut = [case for case in cases if case.fault == "network cut"]
    others = [case for case in cases if case not in cut]
    with ThreadPoolExecutor(1) as aside:
        meanwhile = [aside.submit(apart, folder, case, cut_s) for case in cut]
        told = []
        with servers.rclone(folder / "fleet/store") as server:
            for case in others:
                told.append(play(folder, case, Place(server.env), cut_s))
        told += [one.result() for one in meanwhile]
    (folder / "fleet.json").write_text(json.dumps(told))


def apart(folder: Path, case: Case, cut_s: float) -> dict[str, Any]:
    """A run whose trainer and workers are on one host, and its store on another."""
    with network(folder / "fleet" / case.name) as place:
        return play(folder, case, place, cut_s)


@contextlib.contextmanager
def network(folder: Path) -> Generator[Place]:
    """Two hosts, one with an S3 server. Raises AssertionError where none can be made."""
    assert not hosts.missing(), hosts.missing()
    (folder / "store/bucket").mkdir(parents=True)
    rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    keys = f"{servers.KEY},{servers.SECRET}"
    serve = [rclone, "serve", "s3", str(folder / "store"), "--addr", f":{PORT}", "--auth-key", keys]
    with hosts.Lab([SITE, STORE], folder / "hosts") as lab:
        lab.hosts[STORE].start([*serve, "--config", os.devnull], folder / "store.log")
        endpoint = {"AWS_ENDPOINT_URL": f"http://{lab.hosts[STORE].address}:{PORT}"}
        env = servers.s3_environment(PORT) | endpoint | {"AWS_ALLOW_HTTP": "true"}
        yield Place(env | hosts.SHARED, tuple(lab.hosts[SITE].enter), lab)


def play(folder: Path, case: Case, place: Place, cut_s: float) -> dict[str, Any]:
    """One run with two workers and its fault; returns what happened. Raises AssertionError."""
    config = config_of(folder, case, "fleet")
    base = folder / "fleet" / case.name
    job = FleetJob(config, base, "s3://bucket/runs", place.env, before=place.before)
    began = time.monotonic()
    starts = 1
    try:
        for name in ("w0", "w1"):
            job.add_worker(name)
        job.start()
        job.until(lambda: job.progress().get("step", 0) >= STRUCK_IN, 600, poll_s=0.05)
        if case.fault == "trainer killed":
            job.kill()
            job.start()
            starts += 1
        else:
            strike(job, case, place, cut_s)
        while (code := job.wait(900)) in RECOVER_EXIT_CODES:  # as its platform does
            job.start()
            starts += 1
        assert code == 0, job.told()
        ends = workers_ends(job)
    finally:
        job.kill()
        job.end_workers()
    last = read_history(job.run_dir)[-1]
    print(f"fleet: {case.name}, {case.fault}: {time.monotonic() - began:.0f} s", flush=True)
    return {
        "run": case.name,
        "options": list(case.options),
        "fault": case.fault,
        "seconds": round(time.monotonic() - began),
        "starts_of_the_trainer": starts,
        "workers": ends,
        "counts_of_the_last_attempt": {name: last[f"fleet/{name}"] for name in COUNTS},
    }


def strike(job: FleetJob, case: Case, place: Place, cut_s: float) -> None:
    """A fault that leaves the trainer alive."""
    if case.fault == "worker killed":
        job.workers["w0"].signal(signal.SIGKILL)
        return
    assert place.lab is not None
    place.lab.cut(SITE)
    time.sleep(cut_s)
    place.lab.cut(SITE, up=True)


def workers_ends(job: FleetJob) -> dict[str, dict[str, Any]]:
    """How each worker ended, and how long after its trainer. Raises AssertionError where one goes on."""
    over = time.monotonic()
    ends: dict[str, dict[str, Any]] = {}
    while len(ends) < len(job.workers):
        after_s = time.monotonic() - over
        assert after_s < LATE_S, f"a worker goes on after its run\n{job.told()}"
        for name, worker in job.workers.items():
            if name not in ends and (code := worker.process.poll()) is not None:
                ends[name] = {"code": code, "after_s": round(after_s, 1)}
        time.sleep(0.1)
    assert {end["code"] for end in ends.values()} <= {0, -signal.SIGKILL}, job.told()
    return ends


def compare(folder: Path, cases: Sequence[Case], cut_s: float, out: Path | None) -> None:
    """Holds each run against the one without workers. Raises AssertionError on any difference."""
    played = {one["run"]: one for one in json.loads((folder / "fleet.json").read_text())}
    for case in cases:
        one, other = (Job(config_of(folder, case, part), folder / "compared") for part in ("alone", "fleet"))
        but = ("mismatch/",) if case.options else ()  # with steps ahead it is measured elsewhere
        played[case.name]["equal_to_the_run_without_workers"] = assert_same_run(one, other, but=but)
    show({"steps": STEPS, "cut_s": cut_s, "runs": list(played.values())}, out)


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all of them")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary one")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one of the runs")
    parser.add_argument("--cut", type=float, default=300.0, help="seconds without a network")
    parser.add_argument("--json", type=Path, help="where the figures go")
    a = parser.parse_args()
    if a.part and not a.folder:
        parser.error("--folder says where the other parts are")
    cases = [case for case in CASES if a.only in (None, case.name)]
    with contextlib.ExitStack() as stack:
        folder = a.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-gate-")))
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "base.yaml").exists():
            base = configure(folder, STEPS, 1, False)
            (folder / "base.yaml").write_text(c.dump(base))
        began = time.monotonic()
        try:
            for part in [a.part] if a.part else PARTS:
                match part:
                    case "alone":
                        alone(folder, cases)
                    case "fleet":
                        fleet(folder, cases, a.cut)
                    case "compare":
                        compare(folder, cases, a.cut, a.json)
        except AssertionError as error:
            print(f"the gate failed: {error}", file=sys.stderr)
            return 1
        print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
