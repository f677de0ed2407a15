"""A run that workers sample, and the faults that strike it: what dies, when, and how that must show.

The run with its faults is held against one whose own engines sample and which nothing disturbs, bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import servers
from tests.fleet.jobs import FleetJob, WorkerProcess, other_ranks
from tests.waiting import until
from trainer.config import RunConfig
from trainer.observe.history import read_history
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_PREEMPTED, RECOVER_EXIT_CODES

LOST_S = 8.0
READY = "ready after"
LATE_S = 120.0
"""Longest time that a worker may outlive its run, on a busy machine."""
CUT_S = 12.0
STALLED_S = 300.0
"""Seconds without an answer of the store: longer than a request is tried again."""
DRAWN = {
    "worker killed": 4,
    "worker noticed": 2,
    "worker stopped": 2,
    "trainer killed": 1,
    "network cut": 2,
    "objects forged": 2,
}
"""How often each of the faults is drawn, of 13."""
LASTING = "w1"
"""The worker that is never ended: what it holds is that of the whole run."""
MOST_VERSIONS = 24
"""Versions that the bucket may hold: two checkpoints, two steps apart, and what is behind them while the next
is committed."""


@dataclass
class Strike:
    """A fault that was drawn."""

    fault: str
    step: int
    phase: str


class FaultRun:
    """A trainer, its workers and their bucket. A trainer that ends with a code after which a platform starts
    it again is started again."""

    pause_s = 0.02
    """Seconds between two looks at what goes on."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        bucket: str,
        server: servers.S3Server | None = None,
        relay: servers.Proxy | None = None,
        seed: int = 0,
        draws: int = 8,
        seconds: float = 90.0,
    ) -> None:
        """bucket: a folder, or `s3://...` of the server. relay: what the run reaches the server through.
        draws: faults that are drawn where some are, within about so many seconds."""
        env = dict(server.env) if server else {}
        through = servers.s3_environment(relay.port) if relay else env
        self.job = FleetJob(config, folder, bucket, through, [f"fleet.lost_s={LOST_S}"])
        self.relay = relay
        self.rng = random.Random(seed)
        self.starts = 0
        self.names = 0
        self.over = threading.Event()
        """Set when the run has ended."""
        self.draws, self.seconds = draws, seconds
        self.drawn: list[Strike] = []
        self.replaced: list[WorkerProcess] = []
        """Workers that had ended, for each of which another has come."""
        self.most_objects: Counter[str] = Counter()
        """The most objects that a folder of `fleet` was seen with."""
        self.store = Storage(f"{bucket}/{config.run_id}", env=os.environ | env)

    def play(self, faults: Sequence[str], workers: int = 2) -> None:
        """Plays the whole run; each fault strikes when its moment has come, one after the other. Raises
        AssertionError where trainer or workers do not end as they must, or a fault left no trace."""
        try:
            for _ in range(workers):
                self.add_worker()
            self.start_trainer()
            for name in faults:
                self.live(until=lambda name=name: FAULTS[name].moment(self))
                assert self.job.process and self.job.process.poll() is None, f"over before {name}"
                FAULTS[name].strike(self, self.job.workers["w1"])
            self.finish()
        finally:
            self.over.set()
            self.job.kill()
            self.job.end_workers()
        for name in faults:
            FAULTS[name].check(self)

    def start_trainer(self) -> None:
        self.starts += 1
        self.job.start()

    def add_worker(self, module: str = "trainer.fleet.worker") -> WorkerProcess:
        self.names += 1
        return self.job.add_worker(f"w{self.names}", module=module)

    def live(self, seconds: float = 900.0, until: Callable[[], object] = lambda: False) -> None:
        """Lets the run go on for some time, until something is so, or to its end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            assert self.job.process is not None
            code = self.job.process.poll()
            if code == 0:
                return
            if code is not None:
                assert code in RECOVER_EXIT_CODES or code < 0, f"exit code {code}\n{self.job.told()}"
                self.start_trainer()
            time.sleep(self.pause_s)

    def replace_workers(self) -> None:
        """Brings another for every worker that has gone, as a platform does."""
        for name, worker in list(self.job.workers.items()):
            if worker.process.poll() is not None:
                self.replaced.append(self.job.workers.pop(name))
                self.add_worker()

    def count_objects(self) -> Counter[str]:
        """Objects of each folder of `fleet` that the bucket holds now."""
        objects = Counter(key.split("/")[1] for key, _ in self.store.list("fleet"))
        self.most_objects |= objects
        return objects

    def finish(self) -> None:
        """Waits for the end of the run, and of its workers."""
        self.live()
        assert self.job.process and self.job.process.poll() == 0, self.job.told()
        self.over.set()
        for worker in self.job.workers.values():
            if worker.process.poll() is None:
                assert worker.wait(LATE_S) == 0, worker.said()

    def trained(self) -> list[dict[str, float]]:
        """The metrics of every step."""
        return read_history(self.job.run_dir)


def leaves_no_trace(run: FaultRun) -> None:
    """Whatever the fault did, the run shows none of it but in who sampled what."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run."""

    moment: Callable[[FaultRun], object]
    """Whether it may strike now."""
    strike: Callable[[FaultRun, WorkerProcess], None]
    """Strikes; the worker is the one that it is for, if it is for one."""
    check: Callable[[FaultRun], None] = leaves_no_trace
    """What must be seen of it after the run. Raises AssertionError."""


def waits_in(step: int) -> Callable[[FaultRun], bool]:
    """Whether the trainer waits for the samples of this step or of a later one, as it does on policy."""
    return lambda run: run.job.in_phase("wait", step)


def in_step(step: int) -> Callable[[FaultRun], bool]:
    """Whether the trainer is in this step or in a later one; with steps ahead it may never wait."""
    return lambda run: run.job.progress().get("step", 0) >= step


def is_committed(run: FaultRun) -> bool:
    """Whether the run is in step 4 or later, with a checkpoint in the bucket."""
    return run.job.progress().get("step", 0) >= 4 and any_manifest(run)


def any_manifest(run: FaultRun) -> bool:
    return any(key.endswith("manifest.json") for key, _ in run.store.list("checkpoints"))


def kill_worker(run: FaultRun, worker: WorkerProcess) -> None:
    """SIGKILL, as when its machine is taken away."""
    worker.signal(signal.SIGKILL)
    worker.process.wait()


def notice_worker(run: FaultRun, worker: WorkerProcess) -> None:
    """SIGTERM, as before its machine is taken away."""
    worker.signal(signal.SIGTERM)


def stop_worker(run: FaultRun, worker: WorkerProcess) -> None:
    """Silent for longer than `fleet.lost_s`, while the run goes on; then it goes on too."""
    worker.signal(signal.SIGSTOP)

    def go_on() -> None:
        run.over.wait(LOST_S + 2)
        worker.signal(signal.SIGCONT)

    threading.Thread(target=go_on, daemon=True).start()


def stop_workers_at_random(run: FaultRun, _: WorkerProcess) -> None:
    """Stopped for up to two seconds, again and again, one at a time: who is first is left to chance."""

    def disturb() -> None:
        while not run.over.wait(run.rng.uniform(0.2, 2.0)):
            worker = run.rng.choice(list(run.job.workers.values()))
            worker.signal(signal.SIGSTOP)
            run.over.wait(run.rng.uniform(0.2, 2.0))
            worker.signal(signal.SIGCONT)

    threading.Thread(target=disturb, daemon=True).start()


def kill_rank(run: FaultRun, worker: WorkerProcess) -> None:
    """SIGKILL of the second rank of its engine, and another worker comes."""
    (rank_1,) = other_ranks(worker.process.pid)
    os.kill(rank_1, signal.SIGKILL)
    assert worker.wait() == EXIT_NODE_LOST, run.job.told()
    run.add_worker()


def add_liar(run: FaultRun, _: WorkerProcess) -> None:
    """A worker joins whose engine holds other weights than it says. The trainer, which would not wait for it,
    stands still until it is there."""
    run.job.signal(signal.SIGSTOP)
    liar = run.job.add_worker("liar", module="tests.fleet.lying_worker")
    until(lambda: READY in liar.said(), 300)
    run.job.signal(signal.SIGCONT)


def check_liar(run: FaultRun) -> None:
    liar = run.job.workers["liar"]
    assert liar.process.returncode == EXIT_CONFIG, liar.said()
    assert "and the policy differ by" in liar.said() and "rollout.sync_tolerance" in liar.said()
    assert run.trained()[-1]["fleet/turned_away"] == 1


def kill_trainer(run: FaultRun, _: WorkerProcess) -> None:
    """SIGKILL of all its processes; the platform starts it again."""
    run.job.kill()
    run.start_trainer()


def kill_trainer_without_checkpoint(run: FaultRun, worker: WorkerProcess) -> None:
    kill_trainer(run, worker)
    assert not any_manifest(run), "it was to be killed before its first checkpoint"


def check_new_attempt(run: FaultRun) -> None:
    """A worker has followed the newest attempt, all have ended with it, and no patch of an older one stays.
    A worker that looks for a newer attempt from time to time may find that one over."""
    newest = run.starts
    workers = [worker for worker in run.job.workers.values() if worker.process.returncode == 0]
    assert any(f"follows attempt {newest}-" in worker.said() for worker in workers)
    assert all("has reached its last step" in worker.said() for worker in workers)
    patches = [key for key, _ in run.store.list("fleet/weights") if key.endswith(".patch")]
    assert all(f"/{newest}-" in key for key in patches), "patches of an attempt that was killed stay"


def check_resumed(run: FaultRun) -> None:
    log = run.job.log.read_text()
    assert re.search(r"^resumed from step [24]$", log, re.MULTILINE), log[-4000:]
    check_new_attempt(run)


def check_from_scratch(run: FaultRun) -> None:
    assert run.job.log.read_text().count("starting from scratch") == 2
    check_new_attempt(run)


def cut_network(run: FaultRun, _: WorkerProcess, seconds: float = CUT_S) -> None:
    """The store refuses every connection, for longer than a worker may be silent."""
    assert run.relay is not None
    run.relay.cut()
    run.live(seconds)
    run.relay.restore()


def stall_network(run: FaultRun, _: WorkerProcess) -> None:
    """The store answers nothing, as behind a cable that is pulled; then every connection breaks."""
    assert run.relay is not None
    run.relay.stall()
    run.live(STALLED_S)
    run.relay.cut()
    run.relay.restore()


def forge_objects(run: FaultRun, _: WorkerProcess) -> None:
    """Somebody writes to the run's folder `fleet` without the key: new objects, copies of real ones under
    other names, and noise in the place of real ones."""
    store, bucket = run.store, "fleet"
    keys = [key for key, _ in store.list(bucket)]
    heads = sorted(key for key in keys if key.startswith(f"{bucket}/head/") and "ffffff" not in key)
    heartbeats = [key for key in keys if key.startswith(f"{bucket}/workers/w")]
    if not heads or not heartbeats:  # the trainer or its workers have just begun
        return
    attempt = heads[-1].rpartition("/")[2].removesuffix(".json")
    store.put_bytes(f"{bucket}/workers/stranger.json", os.urandom(32) + b'{"worker": "stranger"}')
    store.put_bytes(f"{bucket}/workers/copied.json", store.get_bytes(heartbeats[0]))
    store.put_bytes(f"{bucket}/mail/{attempt}/stranger.json", os.urandom(64))
    for folder in ("head", "about"):
        copy = store.get_bytes(f"{bucket}/{folder}/{attempt}.json")
        store.put_bytes(f"{bucket}/{folder}/99-ffffff.json", copy)
    for number in range(8, 20):
        store.put_bytes(f"{bucket}/samples/{attempt}/{number:06d}.1-w2.npz", os.urandom(2048))
    for key in run.rng.sample(keys, min(6, len(keys))):
        if key.startswith((f"{bucket}/workers/", f"{bucket}/mail/", f"{bucket}/samples/")):
            store.put_bytes(key, os.urandom(300))


def check_forged(run: FaultRun) -> None:
    last = run.trained()[-1]
    assert last["fleet/forged"] > 0 and last["fleet/refused"] == 0


def draw_faults(run: FaultRun, _: WorkerProcess) -> None:
    """Some of DRAWN, one after the other; another worker comes for each that has gone."""
    begun = time.monotonic()
    while len(run.drawn) < run.draws:
        due = begun + (len(run.drawn) + run.rng.random()) * run.seconds / run.draws
        run.live(max(1.0, due - time.monotonic()))
        if run.job.process is None or run.job.process.poll() == 0:
            break
        run.replace_workers()
        run.count_objects()
        (fault,) = run.rng.choices(list(DRAWN), list(DRAWN.values()))
        progress = run.job.progress()
        run.drawn.append(Strike(fault, progress.get("step", 0), progress.get("phase", "")))
        names = [name for name in sorted(run.job.workers) if fault == "worker stopped" or name != LASTING]
        ready = [name for name in names if READY in run.job.workers[name].said()]
        FAULTS[fault].strike(run, run.job.workers[run.rng.choice(ready or names)])
    run.replace_workers()


def check_drawn(run: FaultRun) -> None:
    """Every worker has ended as it must, and the bucket held no more than the newest checkpoints need."""
    codes = {worker.process.returncode for worker in (*run.replaced, *run.job.workers.values())}
    assert codes <= {0, -signal.SIGKILL, -signal.SIGTERM, EXIT_PREEMPTED}, codes
    assert run.drawn and run.most_objects["weights"] <= 2 * MOST_VERSIONS, run.most_objects


FAULTS = {
    "worker killed": Fault(in_step(2), kill_worker),
    "worker noticed": Fault(in_step(2), notice_worker),
    "worker stopped": Fault(in_step(2), stop_worker),
    "workers stopped at random": Fault(lambda run: True, stop_workers_at_random),
    "rank of an engine killed": Fault(in_step(2), kill_rank),
    "liar": Fault(waits_in(1), add_liar, check_liar),
    "trainer killed early": Fault(
        lambda run: waits_in(2)(run) and run.store.list("fleet/weights"),
        kill_trainer_without_checkpoint,
        check_from_scratch,
    ),
    "trainer killed": Fault(is_committed, kill_trainer, check_resumed),
    "network cut": Fault(in_step(3), cut_network),
    "network stalled": Fault(in_step(3), stall_network),
    "objects forged": Fault(in_step(2), forge_objects, check_forged),
    "faults drawn": Fault(in_step(1), draw_faults, check_drawn),
}
