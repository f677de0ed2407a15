"""Decodes images of a pack in worker processes, which an image may kill, or someone from outside."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from data_prep.ingest.images import ImageFacts, inspect
from trainer.images.decoding import ImageLimits

IMAGE_TIMEOUT_S = 60.0
"""Time for each image of a batch, after which its worker is killed: the decoder hangs."""


def check(pack: str, places: list[tuple[int, int]], limits: ImageLimits) -> list[ImageFacts]:
    """Runs in a worker: reads and inspects the images at (offset, size) of the pack."""
    descriptor = os.open(pack, os.O_RDONLY)
    try:
        return [inspect(os.pread(descriptor, size, offset), limits) for offset, size in places]
    finally:
        os.close(descriptor)


def _timed(timeout_s: float, function: Callable, *args):
    """Runs in a worker: the kernel kills it, even inside a decoder, when the function takes longer."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass
class _Task:
    places: list[tuple[int, int]]
    future: Future


class Checks:
    """Batches of images go in by `submit`, their facts come out by `take` in the same order.

    A worker that dies takes what is queued with it: those batches are decoded again image by image in a
    process of their own, so that only the image that did it is lost.
    """

    def __init__(self, pack: Path, limits: ImageLimits, workers: int) -> None:
        self._pack = str(pack)
        self._limits = limits
        self._workers = workers
        self._pool = _pool(workers)
        self._single = _pool(1)
        self._tasks: deque[_Task] = deque()

    def submit(self, places: list[tuple[int, int]]) -> None:
        """Queues the images at (offset, size) of the pack. There may be none."""
        try:
            future = self._start(self._pool, places)
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = _pool(self._workers)
            future = self._start(self._pool, places)
        self._tasks.append(_Task(places, future))

    def _start(self, pool: ProcessPoolExecutor, places: list[tuple[int, int]]) -> Future:
        timeout_s = IMAGE_TIMEOUT_S * max(1, len(places))
        return pool.submit(_timed, timeout_s, check, self._pack, places, self._limits)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._tasks) and self._tasks[0].future.done()

    def take(self) -> list[ImageFacts]:
        """The facts of the oldest batch."""
        task = self._tasks.popleft()
        try:
            return task.future.result()
        except BrokenProcessPool:
            return [self._alone(place) for place in task.places]

    def _alone(self, place: tuple[int, int]) -> ImageFacts:
        why = ""
        # A second try, since someone else may have killed the first worker.
        for _ in range(2):
            begun = time.monotonic()
            try:
                return self._start(self._single, [place]).result()[0]
            except BrokenProcessPool:
                hung = time.monotonic() - begun >= IMAGE_TIMEOUT_S
                why = f"not decoded within {IMAGE_TIMEOUT_S:g} s" if hung else "the decoder died on it"
                self._single.shutdown()
                self._single = _pool(1)
                if hung:
                    break
        return ImageFacts(sha256="", error=f"image_crashed: {why}")

    def close(self) -> None:
        """Ends the processes, without what is still queued."""
        for pool in (self._pool, self._single):
            pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=_context(), initializer=_end_with_the_caller)


def _end_with_the_caller() -> None:
    """Ends this worker when the process that asked for it is gone, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    caller = multiprocessing.parent_process()

    def watch() -> None:
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def warm_up() -> None:
    """Starts to load what the workers need, while the caller continues."""
    _context()
    resource_tracker.ensure_running()  # signals that are blocked while it starts are unblocked again
    # Ctrl-C is for the caller, who ends the others.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forked from one that imported Pillow and numpy, and that has no
    threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_prep.ingest.checking", "PIL.JpegImagePlugin", "PIL.PngImagePlugin"])
    return context
