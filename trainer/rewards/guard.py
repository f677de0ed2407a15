"""Connections that keep a server waiting are dropped: uvicorn itself waits for a request's head for ever."""

from __future__ import annotations

import asyncio
import resource
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""From connecting, or from the last reply, to the end of a request's head."""
MAX_CONNECTIONS = 512
"""Fewer where the limit of open files is low. One more drops the one that has kept the server waiting
the longest."""
SPARE_FILES = 64
"""For everything but connections: grader processes, logs, libraries."""


def max_connections() -> int:
    """How many connections are held at once."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        min(MAX_CONNECTIONS, max(8, files - SPARE_FILES))
        if files != resource.RLIM_INFINITY
        else MAX_CONNECTIONS
    )


class GuardedProtocol(H11Protocol):
    """One connection."""

    waiting_since: float | None = None
    """While its request has not arrived as a whole."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Makes room by dropping the longest wait."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > max_connections():
            waiting = [
                c for c in self.connections if isinstance(c, GuardedProtocol) and c.waiting_since is not None
            ]
            min(waiting, key=lambda c: c.waiting_since or 0.0).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Ends the wait for the head with the head, and the wait as such with the body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()
            if not self.cycle.more_body:
                self.waiting_since = None

    def on_response_complete(self) -> None:
        """The next request's head is awaited."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
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
