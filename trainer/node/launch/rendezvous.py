"""Connects the node launchers of one job before anything heavy starts, and detects at once when one is gone.

The head listens and the others connect, so the shared address is one that carried real packets. Lines of JSON
over TCP with a heartbeat; independent of Ray, which takes minutes to notice that a machine never connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainer.node import topology
from trainer.system.errors import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_PREFLIGHT, RECOVER_EXIT_CODES

Message = dict[str, Any]

PORT = 6381
"""Next to Ray's 6379 and SkyPilot's Ray on 6380."""
HEARTBEAT_S = 1.0
SILENCE_S = 15.0
"""A node silent for this long is lost (a cut cable; a dead process closes the connection at once)."""

HELLO_S = 5.0
"""A connection that has not said who it is within this time is closed."""
WHOLE_S = 12.0
"""A node whose short message has arrived has this long for the long one: TCP has sent that five times."""
REPORT_S = 30.0
"""Longest that a node that cannot take part tries to tell the head, and then waits for its verdict."""
CODES = (EXIT_CONFIG, *RECOVER_EXIT_CODES)
"""Codes with which nodes that have not begun may leave."""
POLL_S = 0.05
LONGEST_LINE_BYTES = 8 << 20
"""Longest message. The longest of ours, the findings of a node, takes some kilobytes."""
MOST_WAITING = 256
"""Most connections that may wait to be read; with more, the oldest is closed."""


class LaunchEnded(Exception):
    """The launch is over before the job's own end, as the message says.

    code: the exit code for every node. died: whether a process of the run died or hung, while its machine
    answered.
    """

    def __init__(self, code: int, why: str, died: bool = False):
        super().__init__(why)
        self.code, self.died = code, died


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
        with (
            contextlib.suppress(OSError, ValueError, RecursionError),
            self._connection.makefile("rb") as lines,
        ):
            while line := lines.readline(LONGEST_LINE_BYTES):
                message = json.loads(line)
                if not isinstance(message, dict):
                    break  # no launcher of ours
                self._heard = time.monotonic()
                if message:
                    self.inbox.put(message)
        self._closed.set()
        self.inbox.put({})  # wakes up a waiting reader

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send({})


class RendezvousHead:
    """The head's side: one link to every other node, none in a launch of one node."""

    def __init__(
        self,
        nodes: int,
        run_id: str,
        port: int = PORT,
        silence_s: float = SILENCE_S,
        start: Mapping[str, str] | None = None,
        name_of: Callable[[int], str] = "node {}".format,
    ):
        """Listens at once for the other nodes. start: what names this start of the run
        (`topology.start_names`). name_of: a node's name in messages.

        Raises LaunchEnded if the port is taken.
        """
        self.nodes, self.run_id = nodes, run_id
        self._silence_s = silence_s
        self.start = dict(start or {})
        self.name_of = name_of
        self.links: dict[int, Link] = {}
        self.hellos: dict[int, Message] = {}
        self.noticed = False
        """Whether the machine of another node is about to be taken away."""
        self._waiting: dict[Link, float] = {}
        """Connections that have not said yet who they are, and since when."""
        self._here: dict[Link, tuple[int, float]] = {}
        """Those of nodes of this run whose first, short message has arrived, and since when."""
        self._server = socket.socket()
        self.port = 0
        if nodes == 1:
            return
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._server.bind(("", port))
        except OSError:
            why = f"port {port} is taken on the head: end the other run, or set SPOTRL_PORT"
            raise LaunchEnded(EXIT_NODE_LOST, why) from None
        self._server.listen(nodes)
        self.port = self._server.getsockname()[1]

    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return [rank for rank in range(1, self.nodes) if rank not in self.links]

    def accept(self, timeout_s: float) -> int | None:
        """Waits for one node and returns its rank, or None after `timeout_s`.

        Whoever else connects (a port scanner, a late node of another run) is sent away, and the wait goes on.
        Raises LaunchEnded for a node that claims to be of this run and cannot be.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._connect(min(POLL_S, max(0.0, deadline - time.monotonic())))
            for link, since in list(self._waiting.items()):
                hello = link.receive(0)
                if hello is not None and hello.get("kind") in ("here", "who", "verdict"):
                    self._introduced(link, hello)
                elif hello is not None:
                    del self._waiting[link]
                    self._here.pop(link, None)
                    rank = self._admit(link, hello)
                    if rank is not None:
                        return rank
                elif link in self._here:
                    self._refuse_silent(link)
                elif link.lost() or time.monotonic() - since > HELLO_S:
                    del self._waiting[link]
                    link.close()
            if time.monotonic() >= deadline:
                return None

    def _introduced(self, link: Link, message: Message) -> None:
        """Takes a first message that is short enough for every path. Raises LaunchEnded for the verdict
        of another head, which has found that two nodes take themselves for it."""
        if message.get("run") != self.run_id:
            return
        match message["kind"]:
            case "here" if type(message.get("rank")) is int:
                self._here[link] = message["rank"], time.monotonic()
            case "who":
                link.send({"rank": 0, "head": ""})
            case "verdict" if type(message.get("code")) is int:
                link.send({"rank": 0, "head": ""})
                raise LaunchEnded(message["code"], str(message.get("why")))

    def _refuse_silent(self, link: Link) -> None:
        """Raises LaunchEnded where a node's short message came and its long one does not."""
        rank, since = self._here[link]
        lost = link.lost()
        if lost is None and time.monotonic() - since < WHOLE_S:
            return
        del self._waiting[link], self._here[link]
        if lost is None:
            why = (
                f"node {rank} ({link.peer_address}) -> node 0: short packets arrive and long ones do not:"
                " lower the interfaces' MTU to what the network carries"
            )
            own = bool(self.links)  # others came through: it is this machine's port of the network
            self.links[rank] = link  # so that it hears the verdict
            raise LaunchEnded(EXIT_PREFLIGHT if own else EXIT_CONFIG, why)
        link.close()

    def _connect(self, timeout_s: float) -> None:
        """Takes one connection, if there is one. What it says is read beside those of others."""
        self._server.settimeout(timeout_s or 0.001)
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            self._waiting[Link(connection, self._silence_s)] = time.monotonic()
            if len(self._waiting) > MOST_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                oldest.close()

    def _admit(self, link: Link, hello: Message) -> int | None:
        """The node's rank; None for a stranger. Raises LaunchEnded."""
        rank = hello.get("rank")
        host = hello.get("host", link.peer_address)
        if hello.get("kind") != "hello" or type(rank) is not int or "run" not in hello:
            link.close()  # no node of any run
            return None
        who = f"{host} ({link.peer_address})"
        if stranger := self._stranger(hello):
            problem = f"{who} {stranger}"
            print(f"rendezvous: {problem}: sent away", flush=True)
            link.send({"kind": "refused", "code": EXIT_NODE_LOST, "why": problem})
            link.close()
            return None

        problem = ""
        if not 0 < rank < self.nodes or hello.get("nodes") != self.nodes:
            problem = f"{who} claims to be node {rank} of {hello.get('nodes')}, the head expects {self.nodes}"
        elif rank in self.links and self.links[rank].lost() is None:
            problem = f"{who} and {self.hellos[rank].get('host')} both claim to be node {rank}"
        if problem:
            link.send({"kind": "refused", "code": EXIT_CONFIG, "why": problem})
            raise LaunchEnded(EXIT_CONFIG, problem)
        if why := hello.get("broken"):
            self.links[rank] = link  # so that it hears the verdict
            code = hello.get("code")
            raise LaunchEnded(code if code in CODES else EXIT_CONFIG, f"node {rank} ({who}): {why}")
        self.links[rank], self.hellos[rank] = link, hello
        return rank

    def _stranger(self, hello: Message) -> str:
        """What the node belongs to, if it is another run or another start of this run; "" if it is ours."""
        if hello["run"] != self.run_id:
            return f"belongs to run {hello['run']!r}, this head to {self.run_id!r}"
        theirs = hello.get("start")
        if not isinstance(theirs, dict):
            return ""
        # Only names that both sides know are compared: a platform may give a variable to the head alone.
        for name in self.start.keys() & theirs.keys():
            if theirs[name] != self.start[name]:
                value = f"{theirs[name]!r}, not {self.start[name]!r}"
                return f"belongs to another start of this run: its {name} is {value}"
        return ""

    def send(self, message: Message) -> None:
        """Sends a message to every node."""
        for link in self.links.values():
            link.send(message)

    def receive(self) -> list[tuple[int, Message]]:
        """Received messages, with the ranks that sent them."""
        received = []
        for rank, link in self.links.items():
            while (message := link.receive(0)) is not None:
                received.append((rank, message))
        return received

    def lost(self) -> dict[int, str]:
        """Ranks that are gone, and why."""
        return {rank: why for rank, link in self.links.items() if (why := link.lost())}

    def messages(self) -> list[tuple[int, Message]]:
        """What the other nodes have said, by rank. Raises LaunchEnded if one has failed or is lost."""
        received = self.receive()
        for rank, message in received:
            if message["kind"] == "failed":
                why = f"{self.name_of(rank)}: {message['why']}"
                raise LaunchEnded(message["code"], why, died=message["died"])
            self.noticed |= message["kind"] == "notice"
        for rank, why in self.lost().items():
            raise LaunchEnded(EXIT_NODE_LOST, f"{self.name_of(rank)} is lost: it {why}")
        return received

    def names(self, ranks: Iterable[int]) -> str:
        """The names of nodes, for a message."""
        return ", ".join(map(self.name_of, sorted(ranks)))

    def quiet(self) -> bool:
        """Whether any node's heartbeats are late: it may be lost soon."""
        return any(link.quiet for link in self.links.values())

    @property
    def head_address(self) -> str:
        """The head's address as the others reached it. Raises LaunchEnded if they disagree."""
        reached = {link.local_address for link in self.links.values()} or {"127.0.0.1"}
        if len(reached) > 1:
            raise LaunchEnded(
                EXIT_CONFIG,
                f"the nodes reach the head at different addresses ({', '.join(sorted(reached))}): "
                "give all of them the one on the network that they share in SPOTRL_HEAD",
            )
        return reached.pop()

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of all nodes by rank, the head's included. Raises LaunchEnded if the head has several."""
        return {0: self.head_address} | {rank: self.links[rank].peer_address for rank in sorted(self.links)}

    def close(self) -> None:
        for link in (*self.links.values(), *self._waiting):
            link.close()
        self._server.close()


def report_failure(head: str, hello: Message, code: int, why: str, port: int = PORT) -> tuple[int, str]:
    """Tells the head why this node cannot take part, and waits for its verdict: (code, why) to leave with."""
    link = None
    try:
        link = join_head(head, hello | {"broken": why, "code": code}, REPORT_S, port)
        deadline = time.monotonic() + REPORT_S
        while time.monotonic() < deadline and not link.lost():
            message = link.receive(POLL_S) or {}
            if message.get("kind") in ("end", "refused") and message.get("code") in CODES:
                return message["code"], why
    except LaunchEnded:
        pass  # the head is not there either, and will say what it misses
    finally:
        if link is not None:
            link.close()
    return code, why


def join_head(
    head: str,
    hello: Message,
    deadline_s: float,
    port: int = PORT,
    silence_s: float = SILENCE_S,
    stop: Callable[[], bool] = lambda: False,
) -> Link:
    """Connects to the head and says hello. Raises LaunchEnded at the deadline or at `stop()`."""
    deadline = time.monotonic() + deadline_s
    why = "not tried"
    while time.monotonic() < deadline and not stop():
        try:
            link = Link(socket.create_connection((head, port), timeout=5.0), silence_s)
        except OSError as error:
            why = str(error)
            time.sleep(0.5)
            continue
        link.send({"kind": "here", "run": hello["run"], "rank": hello["rank"]})
        link.send({"kind": "hello", **hello})
        return link
    raise LaunchEnded(
        EXIT_NODE_LOST, f"no answer from the head at {head}:{port} within {deadline_s:.0f} s ({why})"
    )


# --- a node whose Python lacks a package: standard library only ---------------------------------------


def leave_for_missing_package(error: ImportError, arguments: list[str]) -> NoReturn:
    """Ends this process after the other nodes have heard why."""
    why = f"{error}: run trainer/shell/setup.sh of the same commit there"
    print(f"error: {why}", file=sys.stderr, flush=True)
    code = EXIT_CONFIG
    with contextlib.suppress(ConfigError, OSError, ValueError, LaunchEnded):
        node = topology.read_node_environment(os.environ)
        port = int(os.environ.get("SPOTRL_PORT", PORT))
        start = topology.start_names(os.environ)
        run = run_id_of(Path(arguments[arguments.index("--config") + 1]).read_text())
        if node.nodes > 1 and node.is_head:
            _tell_all(RendezvousHead(node.nodes, run, port, start=start), code)
        elif node.nodes > 1:
            hello = {"rank": node.rank, "nodes": node.nodes, "run": run, "start": start}
            code, _ = report_failure(node.head, hello | {"host": socket.gethostname()}, code, why, port)
    sys.exit(code)


def run_id_of(text: str) -> str:
    """The run's id in a resolved configuration, without a YAML reader."""
    section = re.search(r"^run:\n((?:[ ]+.*\n?)*)", text, re.MULTILINE)
    named: dict[str, str] = {}
    for key, value in re.findall(r"^\s+(id|name):\s*(.+?)\s*$", section[1] if section else "", re.MULTILINE):
        named[key] = value.strip("'\"")
    return named.get("id") or named.get("name") or "run"


def _tell_all(head: RendezvousHead, code: int) -> None:
    """Waits for the other nodes, and sends them the code."""
    deadline = time.monotonic() + REPORT_S
    while head.missing() and time.monotonic() < deadline:
        with contextlib.suppress(LaunchEnded):
            head.accept(0.5)
    head.send({"kind": "end", "code": code})
    time.sleep(HEARTBEAT_S)
    head.close()
