"""One thing is built beside the use of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(build: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """`map(build, things)`, the next one under way in a thread: two results exist at a time, however many
    there are."""
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
