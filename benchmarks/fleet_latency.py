"""How much of 64 rollout workers' speed is left where the store takes its time for every request.

    python -m benchmarks.fleet_latency    # six minutes; writes fleet_latency.json

The head's thread and the workers' own loop are real, and so is the S3 server on loopback; before it stands a
proxy that holds every answer back. Engines are played: a unit takes them about five seconds of sleep. So what
is lost is the waiting of workers for units and for their own requests. Each delay is played twice, with a
head that makes one request at a time and with one that makes `store_requests.PARALLEL`, as it does.
Weights are not sent: the benchmark of links has them. `trainer_waited_s` is the longest time that the
trainer's own thread spent in one call of the head.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from tests import servers
from tests.fleet.jobs import about_run
from tests.fleet.test_verify import EXPECTED, UNIT, good
from trainer.checkpoint.attempt import Attempts
from trainer.config.run_store import RunStore
from trainer.fleet import dispatch, store_requests
from trainer.fleet.objects import Objects, about_key
from trainer.fleet.worker import Worker
from trainer.storage.seal import KEY_VARIABLE, Seal
from trainer.storage.storage import Storage

OUT = Path(__file__).with_suffix(".json")
KEY = "a secret of the benchmark"
DELAYS_S = (0.05, 0.2)
UNIT_S = 5.0
"""Mean seconds that an engine takes for a unit."""
SPREAD = 0.2
"""Units take up to this share more or less."""
WAITING = 3
"""Units on offer for each worker."""
PROCESSES = 4
"""Processes that the played workers share."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    workers: int
    delay_s: float
    """What every request takes more."""
    requests_at_once: int
    """What the head makes."""
    share_of_speed: float
    """Units of the workers that were accepted, of those that their engines could sample."""
    units: int
    late: int
    lost: int
    trainer_waited_s: float


class PlayedEngine:
    """An engine whose every unit is the same, and takes its time."""

    out_of_step = False

    def __init__(self, name: str) -> None:
        self._rng = random.Random(name)

    def take_weights(self, seen: Any) -> None:
        """There are none."""

    def sample(self, unit: Any, seen: Any) -> tuple[list[Any], float]:
        """Sleeps as long as an engine would work."""
        seconds = UNIT_S * self._rng.uniform(1 - SPREAD, 1 + SPREAD)
        time.sleep(seconds)
        return good(), seconds


def delay(target: int, port: int, delay_s: float) -> None:
    """A proxy on loopback that holds back what comes from `target`, for ever."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                loop.call_later(wait_s, sink.write, data)
        loop.call_later(wait_s, sink.close)

    async def serve(up: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        from_store, to_store = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(up, to_store, 0.0), pump(from_store, down, delay_s))

    async def forever() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    asyncio.run(forever())


def play(root: str, names: Sequence[str]) -> None:
    """Workers of one process, which end with their run."""

    def work(name: str) -> None:
        worker = Worker(root, name, (), idle_s=60.0, poll_s=1.0)
        if worker._wait_for_run() is not None:
            worker.heartbeat.begin(worker.attempt, "played")
            worker._begin(PlayedEngine(name), time.monotonic())  # ty: ignore[invalid-argument-type]

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def lead(root: str, workers: int, delay_s: float, at_once: int, window_s: float) -> Measured:
    """The head's side: offers units without end, and counts what comes of them."""
    store_requests.PARALLEL = at_once
    seal = Seal("run", KEY.encode())
    place = RunStore(root)
    held = Attempts(Storage(place.attempts), seal=seal).take(0)
    objects = Objects(Storage(place.fleet), seal)
    head = dispatch.Dispatcher(objects, held, EXPECTED, lost_s=60.0, wait_s=60.0, say=lambda text: None)
    objects.put_record(about_key(held.name), about_run(held.name))
    head.announce(version=UNIT.version, lineage=UNIT.lineage)
    head.start()
    offered = []
    number = 0
    longest = since = 0.0
    before = 0
    while not since or time.monotonic() - since < window_s:
        began = time.monotonic()
        fresh = []
        while len(offered) + len(fresh) < WAITING * workers:
            number += 1
            fresh.append(replace(UNIT, name=f"{number:06d}"))
        if fresh:
            head.add_units(fresh)
        offered += fresh
        done = [unit for unit in offered if head.has_samples([unit])]
        for unit in done:
            head.wait_for(unit)
            offered.remove(unit)
        if since:
            longest = max(longest, time.monotonic() - began)
        elif len(head.counts.by_worker) == workers:
            since, before = time.monotonic(), head.counts.units
        time.sleep(0.2)
    units = head.counts.units - before
    share = units * UNIT_S / (workers * (time.monotonic() - since))
    late, lost = head.counts.late, head.scheduler.lost
    head.close("over", "the benchmark has ended")
    return Measured(workers, delay_s, at_once, round(share, 3), units, late, lost, round(longest, 3))


def measure(workers: int, delay_s: float, at_once: int, window_s: float) -> Measured:
    """One run, from an empty store to the end of all its processes."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-latency-")))
        store = stack.enter_context(servers.rclone(folder))
        port = servers.free_port()
        slow = context.Process(target=delay, args=(store.port, port, delay_s), daemon=True)
        slow.start()
        servers.wait_for_port(port, timeout_s=120.0)
        os.environ |= servers.s3_environment(port) | {KEY_VARIABLE: KEY}
        root = "s3://bucket/run"
        names = [f"w{number:02d}" for number in range(workers)]
        shares = [names[first::PROCESSES] for first in range(min(PROCESSES, workers))]
        played = [context.Process(target=play, args=(root, share), daemon=True) for share in shares]
        for one in played:
            one.start()
        try:
            return lead(root, workers, delay_s, at_once, window_s)
        finally:
            for one in played:
                one.join(60.0)
            for one in (*played, slow):
                one.kill()
                one.join()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_S, help="seconds of a request")
    parser.add_argument("--seconds", type=float, default=60.0, help="counted of each run")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rows = []
    begun_load = os.getloadavg()[0]
    for delay_s in options.delays:
        for at_once in (1, PARALLEL):
            row = measure(options.workers, delay_s, at_once, options.seconds)
            print(row, flush=True)
            rows.append(asdict(row))
    result = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(begun_load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "unit_s": UNIT_S,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


PARALLEL = store_requests.PARALLEL

if __name__ == "__main__":
    main()
