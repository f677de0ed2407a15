"""One node's part of the network checks: it replies to its peers' probes and, on the head's order, probes
them.

Our own sockets and no root: TCP connections to every port that the job will use, datagrams for round trip,
loss and MTU, and streams for bandwidth. Every connection starts with an identity check: the address may lead
somewhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.system import network

CONNECT_S = 3.0
"""Longest wait for a connection between two nodes of one network."""
PINGS = 50
"""Round trips with one datagram under way."""
DATAGRAMS = 3000
"""Datagrams counted for loss: a loss of 1% shows as 30 of them, and 13 are called a failure."""
WINDOW = 32
"""Datagrams under way: too few to fill a socket's buffer, so that none is lost but by the network."""
LATE_S = 1.0
"""A datagram is lost after this long, unless it still comes: busy machines are late, not lossy."""
VOLLEY_S = 10.0
"""Longest that the datagrams of one pair are sent: on a link that loses half, fewer tell enough."""
BUFFER_BYTES = 4 << 20
"""Size of the sockets' buffers: some windows of an echo that gets no processor."""
DATAGRAM_BYTES = 1000
MTU_TRIES = 8
FREE_PORTS = 6
"""Ports tried of the range from which programs get theirs."""
STREAMS = 4
BLOCK = 1 << 20
HEADER = struct.Struct("!16sI")
"""Run and sequence number."""
PMTUDISC_PROBE = 3
"""Linux: never fragment, whatever the kernel believes about the path."""


class Prober:
    """Listens on every port that the job will use, and carries out the head's orders."""

    def __init__(self, rank: int, run_id: str, port: int, ports: Iterable[int], head: str = "") -> None:
        """port: where the other nodes find it (0: any). ports: those that Ray and the ranks will listen
        on. head: where this node looks for the head."""
        self.rank, self.run_id = rank, run_id
        self.head = head
        self.verdict: dict[str, Any] | None = None
        """The head's last word, where it could only be said here: code and why."""
        self.misled: dict[int, str] = {}
        """Nodes that took this one for the head, by rank, and the address at which they found it."""
        self.mark = run_id.encode()[:16].ljust(16, b"\0")
        self.taken: list[int] = []
        self._selector = selectors.DefaultSelector()
        self.port = self._listen(port) or self._listen(0)
        self.ports: list[int] = []
        for wanted in dict.fromkeys(ports):
            if wanted != self.port and self._listen(wanted):
                self.ports.append(wanted)
        self.free = [free for wanted in free_range_ports() if (free := self._listen(wanted, quiet=True))]
        """Ports of the range from which Gloo and NCCL take theirs."""
        self._udp = _datagram_socket()
        self._udp.settimeout(0.5)
        self.udp_port: int = self._udp.getsockname()[1]
        self._echoed: dict[tuple[str, int], int] = {}
        self._closed = threading.Event()
        for work in (self._serve, self._echo):
            threading.Thread(target=work, daemon=True).start()

    def _listen(self, port: int, quiet: bool = False) -> int:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            server.close()
            if not quiet:
                self.taken.append(port)
            return 0
        server.listen(64)
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        return server.getsockname()[1]

    def hello(self, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Facts of this node's network for the head."""
        interfaces = network.interfaces()
        known: dict[str, str] = {}
        for interface in interfaces:
            known.setdefault(interface.name, interface.address)
        chosen = {}
        wrong = []
        for variable in network.INTERFACE_VARIABLES:
            names = network.chosen_interfaces(variable, env.get(variable, ""), known)
            if names:
                chosen[variable] = [names[0], known[names[0]]]
            elif why := network.interface_problem(variable, env.get(variable, ""), known):
                wrong.append(why)
        return {
            "port": self.port,
            "ports": self.ports,
            "free": self.free,
            "udp": self.udp_port,
            "taken": self.taken,
            "chosen": chosen,
            "wrong": wrong,
            "interfaces": known,
            "addresses": [interface.address for interface in interfaces],
            "mtu": {name: interface_mtu(name) for name in known},
            "name": socket.gethostname(),
            "resolves": addresses_of(socket.gethostname()),
        }

    def is_me(self, address: str, port: int) -> bool:
        """Whether an address that should be another node's leads back here."""
        try:
            return self.who(address, port)[0] == self.rank
        except (OSError, ValueError):
            return False

    def who(self, address: str, port: int) -> tuple[int, str]:
        """(rank of the node at an address, where it looks for the head). Raises OSError, ValueError."""
        with self._connect(address, port, "who") as (_, reply):
            return int(reply["rank"]), str(reply.get("head", ""))

    def tell(self, address: str, port: int, code: int, why: str) -> bool:
        """Gives the head's verdict to a node that has not joined it; returns whether it was heard."""
        try:
            with self._connect(address, port, "verdict", code=code, why=why):
                return True
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        self._closed.set()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # ty: ignore[missing-attribute]
        self._udp.close()

    # --- replies ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
                for key, _ in self._selector.select(0.2):
                    connection, _ = key.fileobj.accept()  # ty: ignore[missing-attribute]
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            connection.settimeout(30.0)
            # Closed by reset where we are first: no port may stay in TIME_WAIT when Ray wants it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request = json.loads(_line(connection))
            if not isinstance(request, dict) or request.get("run") != self.run_id:
                return
            if request.get("kind") == "here":  # a node that takes this one for the head
                self.misled[int(request["rank"])] = connection.getsockname()[0]
                why = f"node {self.rank} answers at {connection.getsockname()[0]}, and it is not the head"
                _send(connection, {"kind": "astray", "why": why})
                return
            reply: dict[str, Any] = {"rank": self.rank, "head": self.head}
            if request["do"] == "verdict":
                self.verdict = {"code": int(request["code"]), "why": str(request["why"])}
            if request["do"] == "count":
                reply["count"] = self._echoed.pop((connection.getpeername()[0], request["source"]), 0)
            _send(connection, reply)
            if request["do"] == "stream":
                _send(connection, _drain(connection))
            connection.recv(1)  # the other side closes first

    def _echo(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                data, (address, port) = self._udp.recvfrom(65536)
                if data.startswith(self.mark):
                    self._echoed[address, port] = self._echoed.get((address, port), 0) + 1
                    self._udp.sendto(data, (address, port))

    # --- orders -----------------------------------------------------------------------------------------

    def carry_out_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out one order of the head; bounded in time, never raises."""
        match order["stage"]:
            case "clock":
                return {"time": time.time()}
            case "ports":
                peers = [(int(rank), *peer) for rank, peer in order["peers"].items()]
                names = {int(rank): addresses_of(name) for rank, name in order.get("names", {}).items()}
                reached = self._reach(peers)
                for rank, (address, free) in order.get("free", {}).items():
                    reached += self._reach([(int(rank), address, free)])
                return {"reached": reached, "routes": _routes(peers), "names": names, "misled": self.misled}
            case "datagrams":
                return self._datagrams(order["address"], order["port"], order["udp"], order["mtu"])
            case "stream":
                return self._stream(order["address"], order["port"], order["seconds"])
        raise ValueError(order["stage"])

    def _reach(self, peers: list[tuple[int, str, list[int]]]) -> list[tuple[int, str, int, str]]:
        """(rank, address, port, what is wrong) of every peer's port that does not lead to that peer."""
        wrong: list[tuple[int, str, int, str]] = []
        doors = [(rank, address, port, wrong) for rank, address, ports in peers for port in ports]
        _all_at_once(self._knock, doors, 3 * CONNECT_S)
        return sorted(wrong)

    def _knock(self, rank: int, address: str, port: int, wrong: list[tuple[int, str, int, str]]) -> None:
        try:
            with self._connect(address, port, "who") as (_, reply):
                if reply["rank"] != rank:
                    wrong.append((rank, address, port, f"node {reply['rank']} answers there"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "another program answers there"
            reason = "no answer" if isinstance(error, TimeoutError) else reason.lower()
            wrong.append((rank, address, port, reason))

    @contextlib.contextmanager
    def _connect(self, address: str, port: int, do: str, **more: Any):
        """A connection and the first answer. Raises OSError, ValueError if something else answers."""
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            _send(connection, {"run": self.run_id, "kind": do, "do": do} | more)
            line = _line(connection)
            while line == b"{}\n":  # a heartbeat of the head's
                line = _line(connection)
            reply = json.loads(line)
            if not isinstance(reply, dict) or "rank" not in reply:
                raise ValueError("another program answers there")
            yield connection, reply

    def _datagrams(self, address: str, port: int, udp: int, largest: int) -> dict[str, Any]:
        """Round trip, loss each way, and whether packets of `largest` bytes pass."""
        with _datagram_socket() as own:
            flight = _Flight(own, (address, udp), self.mark)
            trips = [trip for _ in range(PINGS) if (trip := flight.ping(64)) is not None]
            if not trips:
                return {"udp": False}
            flight.sent = flight.back = 0
            flight.seen.clear()
            self._count(address, port, flight, 0)  # begins to count at zero
            flight.volley(DATAGRAMS)
            sent = flight.sent
            arrived = self._count(address, port, flight, sent)
            out = (sent - arrived) / sent
            back = max(0, arrived - flight.back) / sent
            carries = any(flight.ping(largest - 28) is not None for _ in range(MTU_TRIES))
        timed = {"udp": True, "min_s": min(trips), "median_s": statistics.median(trips)}
        return timed | {"carries": carries, "loss_out": out, "loss_back": back}

    def _count(self, address: str, port: int, flight: _Flight, otherwise: int) -> int:
        """Datagrams of a flight that a peer has seen since it was last asked."""
        with (
            contextlib.suppress(OSError, ValueError),
            self._connect(address, port, "count", source=flight.port) as (_, reply),
        ):
            return reply["count"]
        return otherwise

    def _stream(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Bytes per second to a peer over several streams, as the peer counted them."""
        rates: list[float] = []

        def send() -> None:
            with (
                contextlib.suppress(OSError, ValueError),
                self._connect(address, port, "stream") as (connection, _),
            ):
                connection.settimeout(seconds + 2.0)
                block = memoryview(bytes(BLOCK))
                end = time.monotonic() + seconds
                while (left := end - time.monotonic()) > 0:
                    connection.settimeout(max(left, 0.05))
                    with contextlib.suppress(TimeoutError):
                        connection.send(block)
                connection.settimeout(10.0)
                connection.shutdown(socket.SHUT_WR)
                counted = json.loads(_line(connection))
                rates.append(counted["bytes"] / max(counted["seconds"], 1e-3))

        _all_at_once(send, [()] * STREAMS, seconds + 15.0)
        return {"bytes_per_s": sum(rates)}


class _Flight:
    """Datagrams to one echo, and those that came back."""

    def __init__(self, own: socket.socket, to: tuple[str, int], mark: bytes) -> None:
        self.socket, self.to = own, to
        self.mark = mark
        self.port: int = own.getsockname()[1]
        self.sent = self.back = 0
        self._next = 0
        self.seen: set[int] = set()

    def send(self, size: int) -> int:
        self._next += 1
        with contextlib.suppress(OSError):  # larger than the interface takes, or no route for a moment
            self.socket.sendto(HEADER.pack(self.mark, self._next).ljust(size, b"\0"), self.to)
        self.sent += 1
        return self._next

    def receive(self, wait_s: float) -> int | None:
        self.socket.settimeout(max(wait_s, 1e-4))
        try:
            data = self.socket.recv(65536)
        except OSError:
            return None
        mark, number = HEADER.unpack_from(data)
        if mark != self.mark or number in self.seen:
            return -1
        self.seen.add(number)
        self.back += 1
        return number

    def ping(self, size: int, wait_s: float = 0.25) -> float | None:
        """Seconds there and back, or None."""
        began = time.perf_counter()
        number = self.send(size)
        while (left := began + wait_s - time.perf_counter()) > 0:
            if self.receive(left) == number:
                return time.perf_counter() - began
        return None

    def volley(self, count: int) -> None:
        """Sends up to `count` datagrams, never more than WINDOW under way."""
        under_way: dict[int, float] = {}
        end = time.monotonic() + VOLLEY_S
        while self.sent < count and (now := time.monotonic()) < end:
            if len(under_way) < WINDOW:
                under_way[self.send(DATAGRAM_BYTES)] = now
                continue
            oldest = next(iter(under_way))
            returned = self.receive(under_way[oldest] + LATE_S - now)
            under_way.pop(oldest if returned is None else returned, None)
        while self.receive(LATE_S) is not None and self.back < self.sent:
            pass


def _all_at_once(work: Callable[..., None], calls: Iterable[tuple[Any, ...]], wait_s: float) -> None:
    """Makes the calls in threads of their own, each of which is waited for that long."""
    threads = [threading.Thread(target=work, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_s)


def _datagram_socket() -> socket.socket:
    """On a free port; for datagrams that are never fragmented."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    bound.setsockopt(socket.IPPROTO_IP, 10, PMTUDISC_PROBE)  # IP_MTU_DISCOVER
    bound.bind(("", 0))
    return bound


def free_range_ports() -> list[int]:
    """Ports spread over the range from which the system gives one to a program that asks for any."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    step = max(1, (high - low) // FREE_PORTS)
    return [min(high, low + step * number + random.randrange(step)) for number in range(FREE_PORTS)]


def addresses_of(name: str) -> list[str]:
    """IPv4 addresses of a host name; [] where it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """All pairs of nodes in rounds of pairs that share none (the circle method): 4 -> 3 rounds of 2."""
    ring = [*range(nodes), *([-1] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = []
        for a, b in zip(ring[:half], ring[: half - 1 : -1], strict=True):
            if min(a, b) >= 0:  # -1 stands for a pause
                pairs.append((min(a, b), max(a, b)))

        rounds.append(pairs)
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def interface_mtu(interface: str) -> int:
    """Largest packet of an interface, bytes; 0 if the system does not say."""
    import psutil

    known = psutil.net_if_stats()
    return known[interface].mtu if interface in known else 0


def _routes(peers: list[tuple[int, str, list[int]]]) -> dict[int, str]:
    """This node's own address on the way to each peer."""
    routes = {}
    for rank, address, _ in peers:
        with contextlib.suppress(OSError):
            routes[rank] = network.route_address(address)
    return routes


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        part = connection.recv(1)
        if not part:
            return b""
        line += part
    return line


def _drain(connection: socket.socket) -> dict[str, float]:
    buffer = bytearray(BLOCK)
    total = 0
    began = last = 0.0
    while count := connection.recv_into(buffer):
        last = time.monotonic()
        began = began or last
        total += count
    return {"bytes": total, "seconds": last - began if total else 0.0}
