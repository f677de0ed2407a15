"""A rollout worker: `python -m trainer.fleet.worker --run s3://bucket/RUN`, with SPOTRL_FLEET_KEY set.

One engine, outside the trainer's cluster. It reads weights and units from the bucket and writes samples
there; nobody connects to it. It follows the newest attempt of the run, and ends when the run is over (0),
when the trainer was silent for `fleet.idle_s` (0), at a notice of the machine (33), and where model, data,
code or packages are not the trainer's, or its probe is not (2).

It is one process for each GPU of the engine (`rollout.tensor_parallel`). This one is rank 0: it alone speaks
with the bucket, starts the others, and ends when one of them does (34 where that was killed).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig, from_dict, override
from trainer.config.run_store import RunStore
from trainer.config.schema import WORKER_GPU_SHARE
from trainer.fleet.fleet_records import (
    IDLE,
    SAMPLING,
    AboutRun,
    GivenUnit,
    HeartbeatRecord,
    MailedUnit,
    check_same,
)
from trainer.fleet.objects import Objects, samples_key
from trainer.fleet.run_follower import Lookout, RunFollower, SeenRun
from trainer.fleet.sample_intake import pack_samples
from trainer.fleet.worker_heartbeat import HEARTBEAT_S, WorkerHeartbeat, read_heartbeat
from trainer.node.watch.preemption import PreemptionNotice
from trainer.storage.seal import ForgedObject
from trainer.system.errors import StorageError, StoreRefused
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_OK, EXIT_STORAGE
from trainer.system.records import MalformedRecord
from trainer.system.terminal_text import terminal_line

if TYPE_CHECKING:
    from trainer.fleet.engine_ranks import EngineWorker

POLL_S = 1.0
MACHINE_OPTIONS = ("model.path", "data.path", "evaluation.path", "rollout.gpu_memory_utilization",
                   "rollout.kv_cache_gib", "rollout.tensor_parallel", "placement.device",
                   "fleet.idle_s")  # fmt: skip
"""Options that a worker takes from its own configuration and not from the run's."""
FAILURES = 3
"""Times in a row that a unit may fail for its weights before the worker ends."""
SAME_NAME_S = 2.5 * HEARTBEAT_S
"""Seconds in which a worker of the same name that lives would write a heartbeat."""
GOODBYE_S = 5.0
"""Longest time that the last heartbeat may take when a rank has ended: the others compute no more."""
MOST_UNSENT = 2
"""Units whose samples are kept while the store does not take them; then no other is begun."""
END_S = 60.0
"""Longest time from a worker's last word to the end of its process; then its threads' stacks are printed, and
it ends with 1."""
RANK_SAYS_S = 1.0
"""An error in a call of all ranks is most often that one of them has ended, which its watcher soon says."""


def worker_config(about: AboutRun, root: str, folder: str, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration as this machine runs it. root: BUCKET/RUN. Raises ConfigError where an
    override would change what is sampled."""
    run = from_dict(RunConfig, about.config)
    here = replace(
        run,
        run=replace(run.run, dir=folder),
        checkpoint=replace(run.checkpoint, remote=RunStore(root).bucket),
        rollout=replace(run.rollout, sleep_level=0, gpu_memory_utilization=WORKER_GPU_SHARE),
        optimizer=replace(run.optimizer, hpz_ranks=1),
        fleet=replace(run.fleet, gpus_per_node=0),  # those of the run's own nodes
    )
    changed = override(here, list(overrides))
    if why := configuration.difference(changed, configuration.resume_view(run)):
        raise ConfigError(f"a worker samples as its run does: {why}")
    ranks = changed.rollout.tensor_parallel
    return replace(changed, placement=replace(changed.placement, nodes=1, workers_per_node=ranks))


class OutOfStep(Exception):
    """An error within a call of all ranks of an engine, after which none of them can go on."""


class Sender:
    """Sends samples from a thread while the next unit is sampled, in order."""

    def __init__(self, objects: Objects, heartbeat: WorkerHeartbeat, pause_s: float) -> None:
        """pause_s: seconds until samples that the store did not take are sent again."""
        self.objects, self.heartbeat = objects, heartbeat
        self._pause_s = pause_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sender")
        self._unsent: list[Future[None]] = []
        self._attempt = ""
        self._closed = threading.Event()

    def follow(self, attempt: str) -> None:
        """From now on only samples of this attempt are sent."""
        self._attempt = attempt

    def is_full(self) -> bool:
        """Whether as many units as may be wait to be sent. Raises what ended the sending of one, but no
        error of the store."""
        for sending in [sending for sending in self._unsent if sending.done()]:
            self._unsent.remove(sending)
            sending.result()
        return len(self._unsent) >= MOST_UNSENT

    def send(self, attempt: str, given: GivenUnit, key: str, body: bytes, rate: float) -> None:
        """Sends samples, and returns at once. The head hears of them when they are in the bucket."""

        def work() -> None:
            while attempt == self._attempt and not self._closed.is_set():
                try:
                    self.objects.put(key, body)
                except (StorageError, StoreRefused) as error:
                    print(f"worker: unit {given.unit}: {error}", flush=True)
                    self._closed.wait(self._pause_s)
                else:
                    return self.heartbeat.add_sent(attempt, given, rate)

        self._unsent.append(self._pool.submit(work))

    def close(self) -> None:
        """Ends sending: what is not sent by now is not sent."""
        self._closed.set()


class Worker:
    """Rank 0 of a worker, from its start to its end."""

    def __init__(
        self,
        root: str,
        name: str,
        overrides: Sequence[str],
        idle_s: float,
        poll_s: float,
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        """root: BUCKET/RUN. idle_s: longest wait for the first head; then `fleet.idle_s` counts. ends: is
        called when the worker begins to end, before it says goodbye."""
        self.root, self.name = root, name
        self.overrides = overrides
        self.idle_s, self.poll_s = idle_s, poll_s
        self._ends = ends
        store = RunStore(root.rstrip("/"))
        self.following = RunFollower.of(store, store.root.rpartition("/")[2], name)
        self.objects = self.following.objects
        self.heartbeat = WorkerHeartbeat(self.objects, name)
        self._lookout = Lookout(self.following, name, poll_s)
        self._sender = Sender(self.objects, self.heartbeat, poll_s)
        self.why = ""
        self.attempt = ""
        """The attempt of the trainer that it samples for."""
        self._notice: PreemptionNotice | None = None
        self._engine: EngineWorker | None = None
        """The engine is kept to the end of the process: see `main`."""

    def run(self) -> int:
        self._notice = PreemptionNotice(on_notice=self._leave, exit_at_deadline=True)
        try:
            about = self._wait_for_run()
            if about is None:
                return self._ended(self.why)
            return self._serve(about)
        finally:
            self._ends()
            self._notice.close()

    def _leave(self, reason: str) -> None:
        """Ends the worker at a notice, from a thread of its own. What is half sampled is lost: somebody else
        samples it."""
        print(f"worker {self.name}: {reason}", flush=True)
        self.heartbeat.goodbye(reason)
        sys.stdout.flush()
        assert self._notice is not None
        os._exit(self._notice.exit_code)

    def _rank_lost(self, why: str, code: int) -> None:
        """Ends the worker when another rank has ended, from a thread of its own."""
        print(f"worker {self.name}: ends: {why}", flush=True)
        timer = threading.Timer(GOODBYE_S, os._exit, (code or EXIT_ERROR,))
        timer.start()
        self.heartbeat.goodbye(why)
        os._exit(code or EXIT_ERROR)

    def _wait_for_run(self) -> AboutRun | None:
        is_announced = False
        while True:
            self.following.look()
            about = self.following.about()
            if self.following.over:
                self.why = self.following.over
                return None
            if about is not None:
                self.attempt = self.following.attempt
                return about
            if not is_announced:
                print(f"worker {self.name}: waits for the trainer of {self.root}", flush=True)
                is_announced = True
            most_s = self.following.patience_s(self.idle_s)
            if self.following.silent_s() > most_s:
                self.why = f"no trainer of {self.root} within {most_s:.0f} s"
                return None
            time.sleep(self.poll_s)

    def _check_name(self) -> None:
        """Raises ConfigError where another process writes heartbeats under this worker's name: the two would
        take each other's mail. A heartbeat that stands still is that of one that has ended."""
        before = self._namesake()
        if before is None or before.goodbye:
            return
        deadline = time.monotonic() + SAME_NAME_S
        while time.monotonic() < deadline:
            time.sleep(self.poll_s)
            now = self._namesake()
            if now and now.serial != before.serial:
                raise ConfigError(
                    f"a worker called {self.name} is alive on {now.host}: give this one another --name"
                )

    def _namesake(self) -> HeartbeatRecord | None:
        """The heartbeat under this worker's name; None where there is none that can be read."""
        try:
            return read_heartbeat(self.objects, self.name)
        except (ForgedObject, MalformedRecord):
            return None

    def _serve(self, about: AboutRun) -> int:
        check_same(about)
        self._check_name()
        with tempfile.TemporaryDirectory(prefix="spotrl-worker-") as folder:
            config = worker_config(about, self.root, folder, self.overrides)
            configuration.validate(config)
            self.idle_s = config.fleet.idle_s
            from trainer.ranks.environment import rank_environment

            os.environ |= rank_environment(config)  # before torch and vLLM are imported
            from trainer.fleet.engine_ranks import EngineWorker

            started = time.monotonic()
            begin = partial(self.heartbeat.begin, self.attempt)
            self._engine = EngineWorker(config, self.objects, about, self._rank_lost, begin)
            return self._begin(self._engine, started)

    def _begin(self, engine: EngineWorker, started: float) -> int:
        """started: when the engine began to load."""
        self._lookout.start()
        try:
            self._follow(engine, self.attempt)
            print(f"worker {self.name}: ready after {time.monotonic() - started:.0f} s", flush=True)
            return self._loop(engine)
        finally:
            self._sender.close()
            self._lookout.stop()

    def _loop(self, engine: EngineWorker) -> int:
        done: set[GivenUnit] = set()
        failures = 0
        seen = self._lookout.last()
        while True:
            if self.following.over:
                return self._ended(self.following.over)
            if self.following.turned_away:
                self._ended(self.following.turned_away)
                return EXIT_CONFIG
            if self.following.silent_s() > self.idle_s:
                seen = self._lookout.newer()  # the last may be some seconds old
            if self.following.silent_s() > self.idle_s:
                return self._ended(f"the trainer was silent for {self.idle_s:.0f} s (fleet.idle_s)")
            if self.following.attempt != self.attempt:
                self._change_attempt(engine)
                done.clear()
                seen = self._lookout.last()
                continue
            todo = self._todo(seen, done)
            if not todo or seen is None:
                self.heartbeat.note(state=IDLE)
                seen = self._lookout.newer()
                continue
            try:
                self._sample(engine, seen, todo[0])
                done.add(todo[0].given)
                failures = 0
                seen = self._lookout.last()
            except (StorageError, StoreRefused) as error:
                # the same unit again, as long as the trainer asks for it
                print(f"worker {self.name}: unit {todo[0].unit.name}: {error}", flush=True)
                seen = self._lookout.newer()
            except (ValueError, RuntimeError, FileNotFoundError) as error:
                failures += 1
                print(f"worker {self.name}: unit {todo[0].unit.name}: {error}", flush=True)
                if failures == FAILURES:
                    self.heartbeat.goodbye(str(error))
                    raise
                self.following.look_for_newer()
                seen = self._lookout.newer()

    def _todo(self, seen: SeenRun | None, done: set[GivenUnit]) -> list[MailedUnit]:
        """What this worker is asked for and has not sampled; nothing while what it has sampled waits to be
        sent."""
        if seen is None or seen.attempt != self.attempt or self._sender.is_full():
            return []
        return [mailed for mailed in seen.mail if mailed.given not in done]

    def _change_attempt(self, engine: EngineWorker) -> None:
        about = self.following.about()
        assert about is not None
        check_same(about)
        engine.follow(about.layout)
        self._follow(engine, self.following.attempt)
        print(f"worker {self.name}: follows attempt {self.attempt}", flush=True)

    def _follow(self, engine: EngineWorker, attempt: str) -> None:
        """Joins an attempt. Its trainer sees at once that somebody comes, and waits for the probe from when
        the weights are here. A failure to fetch them is tried again with the first unit."""
        self.attempt = attempt
        self._sender.follow(attempt)
        self.heartbeat.follow(attempt)
        try:
            seen = self._lookout.newer()
            wanted = not (self.following.over or self.following.turned_away)
            if seen is not None and seen.attempt == attempt and wanted:
                engine.take_weights(seen)
        except (StorageError, ValueError, RuntimeError, FileNotFoundError) as error:
            print(f"worker {self.name}: {error}", flush=True)
        self.heartbeat.write(state=IDLE)

    def _sample(self, engine: EngineWorker, seen: SeenRun, mailed: MailedUnit) -> None:
        self.heartbeat.note(state=SAMPLING)
        try:
            traces, seconds = engine.sample(mailed.unit, seen)
        except Exception as error:
            if not engine.out_of_step:
                raise
            time.sleep(RANK_SAYS_S)
            self.heartbeat.goodbye(f"the ranks of its engine are out of step: {error}")
            raise OutOfStep from error
        given = mailed.given
        key = samples_key(seen.attempt, given.unit, given.turn, self.name)
        body = pack_samples(mailed.unit, given.turn, self.name, traces)
        self._sender.send(seen.attempt, given, key, body, len(traces) / max(seconds, 1e-3))

    def _ended(self, why: str) -> int:
        self._ends()
        print(f"worker {self.name}: ends: {terminal_line(why)}", flush=True)
        self.heartbeat.goodbye(why)
        return EXIT_OK


def own_name() -> str:
    """A name that no other worker has: the host's, and digits drawn at this start."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    return f"{host}-{secrets.token_hex(3)}"


def main() -> NoReturn:
    """Command line; ends the process. It ends with its engine still there. vLLM's finalizer would destroy the
    process groups, and that joins a thread of torch which asks the ranks' meeting file every second: where it
    is gone with the worker's folder, the thread waits minutes for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", help="the run in its bucket: s3://BUCKET/RUN_ID (or gs://, r2://, a folder)")
    parser.add_argument("--config", help="YAML with fleet.run and checkpoint.remote, in place of --run")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="what is this machine's")
    parser.add_argument("--name", default="", help="default: the host's name and some digits")
    parser.add_argument("--idle", type=float, help="seconds to wait for a trainer; default: fleet.idle_s")
    parser.add_argument("--poll", type=float, default=POLL_S, help="seconds between two looks at the bucket")
    options = parser.parse_args()
    try:
        here = RunConfig() if options.run else _machine_config(Path(options.config or ""))
        own = [] if options.run else machine_options(here)
        root = options.run or RunStore.in_bucket(here.checkpoint.remote, here.fleet.run).root
        idle_s = here.fleet.idle_s if options.idle is None else options.idle
        ends = partial(faulthandler.dump_traceback_later, END_S, exit=True)  # also while a call holds the GIL
        worker = Worker(root, options.name or own_name(), [*own, *options.set], idle_s, options.poll, ends)
        code = worker.run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_CONFIG
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_STORAGE
    except Exception:
        # Not Python's own end, which would wait for what the other ranks never finish.
        traceback.print_exc()
        code = EXIT_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _machine_config(path: Path) -> RunConfig:
    """A worker's configuration. Raises ConfigError where it does not say which run to sample for."""
    if not path.is_file():
        raise ConfigError("which run? give --run BUCKET/RUN_ID, or --config with fleet.run")
    config = configuration.load(path)
    if not (config.fleet.run and config.checkpoint.remote):
        raise ConfigError(f"{path}: fleet.run and checkpoint.remote say which run to sample for: set both")
    return config


def machine_options(config: RunConfig) -> list[str]:
    """What a machine's configuration says of the machine: where model and data lie, and how much of it an
    engine takes."""
    options = []
    for name in MACHINE_OPTIONS:
        section, _, key = name.partition(".")
        options.append(f"{name}={json.dumps(getattr(getattr(config, section), key))}")
    return options


if __name__ == "__main__":
    main()
