"""Requests to the store that the head makes side by side, and those that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer.fleet.objects import Objects

PARALLEL = 32
"""Requests that are made at a time."""
DELETING = 4
"""Objects that are deleted at a time, beside all else."""


class StoreRequests:
    """The head's threads for requests."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="fleet")
        self._arriving = ThreadPoolExecutor(1, thread_name_prefix="fleet-patches")
        self._deleting = ThreadPoolExecutor(DELETING, thread_name_prefix="fleet-delete")

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, and returns at once. One that the store keeps is deleted by the next attempt."""
        for name in names:
            self._deleting.submit(self._objects.storage.delete, [name])

    def when_all_are_there(
        self,
        names: Sequence[str],
        stop: threading.Event,
        then: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Calls `then` once the bucket has all these objects, in the order of these calls; returns at once.
        fail: is called with what waiting or `then` raised."""

        def wait() -> None:
            try:
                if self._objects.wait_for(names, self.pool, stop):
                    then()
            except Exception as error:
                fail(error)

        self._arriving.submit(wait)

    def stop_waiting(self) -> None:
        """Ends what waits for objects, which `stop` of each has ended."""
        self._arriving.shutdown(cancel_futures=True)

    def close(self, finish_deleting: bool) -> None:
        """Ends the threads."""
        self._deleting.shutdown(cancel_futures=not finish_deleting)
        self.pool.shutdown()
