"""Drops connections that keep the server waiting; uvicorn itself waits for the head of a request for ever."""

from __future__ import annotations

import asyncio
import resource
import time
from operator import itemgetter

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""Time from connecting, or from the last reply, to the end of a request's head."""
MAX_CONNECTIONS = 512
"""Connections that are held at once, fewer if the limit of open files is low.

One more connection drops the one that has kept the server waiting longest."""
SPARE_FILES = 64
"""Open files for everything but connections: grader processes, logs, libraries."""


def max_connections() -> int:
    """Number of connections that are held at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(8, files - SPARE_FILES))


class GuardedProtocol(H11Protocol):
    """One connection."""

    waiting_since: float | None = None
    """Time since which the server waits for the rest of a request; None: it does not."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Makes room by dropping the connection that has been waited for longest."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > max_connections():
            waiting = []
            for connection in self.connections:
                if isinstance(connection, GuardedProtocol) and connection.waiting_since is not None:
                    waiting.append((connection.waiting_since, connection))
            _, longest = min(waiting, key=itemgetter(0))
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stops the head's timer once the head is there, and the wait once the body is there."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()
            if not self.cycle.more_body:
                self.waiting_since = None

    def on_response_complete(self) -> None:
        """Waits for the head of the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._cancel()
        self.waiting_since = time.monotonic()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
