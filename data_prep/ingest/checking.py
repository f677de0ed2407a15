"""Pictures of a pack decoded by worker processes, which a picture or a hand from outside may kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from data_prep.ingest.images import ImageLimits, Picture, inspect

FAST_PNG_BYTES = 64 << 20
"""From this size of all pictures on, loading `png.py` in the workers pays."""


def check(pack: str, places: list[tuple[int, int]], limits: ImageLimits, fast_png: bool = False) -> list[Picture]:
    """Runs in a worker: reads and inspects the pictures at (offset, size) of the pack."""
    descriptor = os.open(pack, os.O_RDONLY)
    try:
        return [inspect(os.pread(descriptor, size, offset), limits, fast_png) for offset, size in places]
    finally:
        os.close(descriptor)


@dataclass
class _Task:
    places: list[tuple[int, int]]
    pool: ProcessPoolExecutor | None = None
    """Where it was submitted to last."""
    future: Future[list[Picture]] = field(default_factory=Future)


class Checks:
    """Batches of pictures go in by `submit`, their facts come out by `take` in the same order.

    A worker that dies takes its pool down and with it every batch that waits there. The first of them is then tried
    again alone, and if that fails picture by picture; the others are submitted again.
    """

    def __init__(self, pack: Path, limits: ImageLimits, workers: int, total_bytes: int) -> None:
        """`total_bytes`: about that of all pictures of the pack."""
        self._pack, self._limits, self._workers = str(pack), limits, workers
        self._fast_png = total_bytes >= FAST_PNG_BYTES
        self._pool = self._new_pool(workers)
        self._tasks: deque[_Task] = deque()

    def _new_pool(self, workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, mp_context=_context(self._fast_png))

    def submit(self, places: list[tuple[int, int]]) -> None:
        """Queues the pictures at (offset, size) of the pack. There may be none."""
        task = _Task(places)
        if places:
            self._start(task)
        else:
            task.future.set_result([])
        self._tasks.append(task)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._tasks) and self._tasks[0].future.done()

    def take(self) -> list[Picture]:
        """The facts of the oldest batch."""
        task = self._tasks.popleft()
        try:
            return task.future.result()
        except BrokenProcessPool:
            pass
        if task.pool is not self._pool:  # died with a pool that was replaced since, as did those behind it
            for lost in (task, *self._tasks):
                if lost.pool is not self._pool and _is_lost(lost.future):
                    self._start(lost)
            self._tasks.appendleft(task)
            return self.take()
        self._renew()
        try:
            self._start(task)
            return task.future.result()
        except BrokenProcessPool:
            self._renew()
            return [self._alone(place) for place in task.places]

    def _start(self, task: _Task) -> None:
        try:
            task.future = self._pool.submit(check, self._pack, task.places, self._limits, self._fast_png)
        except BrokenProcessPool:
            self._renew()
            task.future = self._pool.submit(check, self._pack, task.places, self._limits, self._fast_png)
        task.pool = self._pool

    def _renew(self) -> None:
        self._pool.shutdown()
        self._pool = self._new_pool(self._workers)

    def _alone(self, place: tuple[int, int]) -> Picture:
        """One picture in a process of its own: finds the one that took a worker down with it."""
        with self._new_pool(1) as pool:
            try:
                return pool.submit(check, self._pack, [place], self._limits).result()[0]
            except BrokenProcessPool:
                return Picture(sha256="", error="image_crashed: the decoder died on it")

    def close(self) -> None:
        """Ends the processes, without what is still queued."""
        self._pool.shutdown(cancel_futures=True)


def _is_lost(future: Future) -> bool:
    return isinstance(future.exception(), BrokenProcessPool)  # a broken pool has ended all its futures


def warm_up(total_bytes: int) -> None:
    """Begins to load what the workers need for pictures of this size in all, while the caller goes on."""
    _context(total_bytes >= FAST_PNG_BYTES)
    resource_tracker.ensure_running()  # unblocks what is blocked while it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the caller, who ends the others
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context(fast_png: bool) -> multiprocessing.context.ForkServerContext:
    """Processes are not forked from here, which may have threads, but from one that imported Pillow and numpy once."""
    context = multiprocessing.get_context("forkserver")
    modules = ["data_prep.ingest.checking", "PIL.Image", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "numpy"]
    context.set_forkserver_preload(modules + ["data_prep.ingest.png"] * fast_png)
    return context
