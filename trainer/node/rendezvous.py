"""Connects the node launchers of one job before anything heavy starts, and detects at once when one is gone.

The head listens and the others connect, so the shared address is one that carried real packets. Lines of JSON
over TCP with a heartbeat; independent of Ray, which takes minutes to notice that a machine never connected.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

PORT = 6381
"""Next to Ray's 6379 and SkyPilot's Ray on 6380."""
HEARTBEAT_S = 1.0
SILENCE_S = 15.0
"""A node silent for this long is lost (a cut cable; a dead process closes the connection at once)."""


class RendezvousError(RuntimeError):
    """A node did not connect, connected twice or belongs to another run. The message names it."""


class Link:
    """One connection: messages in `inbox`, a heartbeat both ways."""

    def __init__(self, connection: socket.socket, silence_s: float = SILENCE_S):
        self._connection, self._silence_s = connection, silence_s
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without it a send to a machine that is gone would block for minutes.
        connection.setsockopt(socket.IPPROTO_TCP, 18, int(silence_s * 1000))  # TCP_USER_TIMEOUT
        self.local_address: str = connection.getsockname()[0]
        self.peer_address: str = connection.getpeername()[0]
        self.inbox: queue.Queue[Message] = queue.Queue()
        self._heard = time.monotonic()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message; a broken connection is reported by `lost`, not here."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s` or when the other side is gone."""
        try:
            return (self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()) or None
        except queue.Empty:
            return None

    def lost(self) -> str | None:
        """Why the other side is gone, or None. Earlier messages stay in the inbox."""
        if self._closed.is_set():
            return "closed the connection"
        silent = time.monotonic() - self._heard
        return f"has been silent for {silent:.0f} s" if silent > self._silence_s else None

    @property
    def quiet(self) -> bool:
        """Whether heartbeats are late: the node may be lost soon."""
        return time.monotonic() - self._heard > 2.5 * HEARTBEAT_S

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._connection.makefile("rb"):
                self._heard = time.monotonic()
                if message := json.loads(line):
                    self.inbox.put(message)
        self._closed.set()
        self.inbox.put({})  # wakes up a waiting reader

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send({})


class Head:
    """The head's side: one link to every other node."""

    def __init__(self, nodes: int, run_id: str, port: int = PORT, silence_s: float = SILENCE_S):
        """Listens at once. Raises RendezvousError if the port is taken."""
        self.nodes, self.run_id, self._silence_s = nodes, run_id, silence_s
        self.links: dict[int, Link] = {}
        self.hellos: dict[int, Message] = {}
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._server.bind(("", port))
        except OSError:
            raise RendezvousError(
                f"port {port} is taken on the head: end the other run, or set SPOTRL_PORT"
            ) from None
        self._server.listen(nodes)
        self.port: int = self._server.getsockname()[1]

    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return [rank for rank in range(1, self.nodes) if rank not in self.links]

    def accept(self, timeout_s: float) -> int | None:
        """Accepts one node and returns its rank, or None after `timeout_s`. Raises RendezvousError for a
        wrong node."""
        self._server.settimeout(timeout_s)
        try:
            connection, (address, _) = self._server.accept()
        except TimeoutError:
            return None
        link = Link(connection, self._silence_s)
        hello = link.receive(5.0)
        if hello is None or "rank" not in hello:
            link.close()  # a port scanner, or a health probe
            return None
        rank, host = int(hello["rank"]), hello.get("host", address)
        problem = ""
        if hello.get("run") != self.run_id:
            problem = f"{host} ({address}) belongs to run {hello.get('run')!r}, this head to {self.run_id!r}"
        elif not 0 < rank < self.nodes or hello.get("nodes") != self.nodes:
            claim = f"claims to be node {rank} of {hello.get('nodes')}"
            problem = f"{host} ({address}) {claim}, the head expects {self.nodes}"
        elif rank in self.links and self.links[rank].lost() is None:
            problem = f"{host} ({address}) and {self.hellos[rank].get('host')} both claim to be node {rank}"
        if problem:
            link.send({"kind": "refused", "why": problem})
            raise RendezvousError(problem)
        self.links[rank], self.hellos[rank] = link, hello
        return rank

    def send(self, message: Message) -> None:
        """Sends a message to every node."""
        for link in self.links.values():
            link.send(message)

    def receive(self) -> list[tuple[int, Message]]:
        """Received messages, with the ranks that sent them."""
        found = []
        for rank, link in self.links.items():
            while (message := link.receive(0)) is not None:
                found.append((rank, message))
        return found

    def lost(self) -> dict[int, str]:
        """Ranks that are gone, and why."""
        return {rank: why for rank, link in self.links.items() if (why := link.lost())}

    def quiet(self) -> bool:
        """Whether any node's heartbeats are late."""
        return any(link.quiet for link in self.links.values())

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self._server.close()


def join(
    head: str,
    hello: Message,
    deadline_s: float,
    port: int = PORT,
    silence_s: float = SILENCE_S,
    stop: Callable[[], bool] = lambda: False,
) -> Link:
    """Connects to the head and sends the hello message. Raises RendezvousError at the deadline or at
    `stop()`."""
    deadline, why = time.monotonic() + deadline_s, "not tried"
    while time.monotonic() < deadline and not stop():
        try:
            link = Link(socket.create_connection((head, port), timeout=5.0), silence_s)
        except OSError as error:
            why = str(error)
            time.sleep(0.5)
            continue
        link.send({"kind": "hello", **hello})
        return link
    raise RendezvousError(f"no answer from the head at {head}:{port} within {deadline_s:.0f} s ({why})")
