"""Builds the next thing while the current one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def build_ahead(build: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """Like `map(build, things)`, but builds the next result in a thread. At most two results exist at a
    time."""
    with ThreadPoolExecutor(1, "prefetch") as thread:
        queue = iter(things)
        first = next(queue, None)
        if first is None:
            return
        coming = thread.submit(build, first)
        for thing in queue:
            ready = coming.result()
            coming = thread.submit(build, thing)
            yield ready
            del ready
        yield coming.result()
