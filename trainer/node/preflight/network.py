"""The network between the nodes, measured in rounds. What it means: network_checks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.node.preflight import thresholds
from trainer.node.preflight.probe import pair_rounds

Orders = Mapping[int, dict[str, Any]]
Ask = Callable[[Orders], dict[int, dict[str, Any]]]
"""Sends nodes their orders and returns the replies by rank; a clock's has `offset_s`."""

PAIR_SECONDS = 16.0
"""Seconds of streaming, shared between all rounds: 1 s a direction for 4 nodes, less for many."""


@dataclass(frozen=True)
class Pair:
    """What was measured between two nodes, a < b."""

    a: int
    b: int
    round_trip_ms: float = 0.0
    """The best; 0 where datagrams do not pass at all."""
    loss: tuple[float, float] = (0.0, 0.0)
    """From a to b, and back."""
    carries: bool = True
    """Packets of the interface's size pass."""
    bytes_per_s: tuple[float, float] = (0.0, 0.0)
    """From a to b, and back."""
    udp: bool = True


@dataclass
class Survey:
    hellos: dict[int, dict[str, Any]]
    """`Prober.hello` of every node."""
    addresses: dict[int, str]
    """Every node's address as the head reaches it (its own as the others do)."""
    offsets_s: dict[int, float] = field(default_factory=dict)
    """Clock against the head's."""
    reached: dict[int, list[tuple[int, str, int, str]]] = field(default_factory=dict)
    routes: dict[int, dict[int, str]] = field(default_factory=dict)
    names: dict[int, dict[int, list[str]]] = field(default_factory=dict)
    """Addresses to which each node resolves the others' host names."""
    pairs: list[Pair] = field(default_factory=list)

    def cut(self) -> set[tuple[int, int]]:
        """Directions in which a node reaches no port of the other."""
        directions = set()
        for source, wrong in self.reached.items():
            lost: Counter[int] = Counter()
            for to, address, port, _ in wrong:
                hello = self.hellos[to]
                known = port == hello["port"] or port in hello["ports"]
                lost[to] += known and address == self.addresses[to]
            for to, hello in self.hellos.items():
                # the port at which the other nodes find it, and the others
                if lost[to] >= 1 + len(hello["ports"]):
                    directions.add((source, to))
        return directions


def survey_network(hellos: dict[int, dict[str, Any]], addresses: dict[int, str], ask: Ask) -> Survey:
    """Measures everything: clocks, then ports from everyone to everyone, then every pair."""
    survey = Survey(hellos, addresses)
    clocks = ask(dict.fromkeys(hellos, {"stage": "clock"}))
    for rank, clock in clocks.items():
        survey.offsets_s[rank] = clock["offset_s"]

    answers = ask({rank: _knocking(rank, survey) for rank in hellos})
    for rank, answer in answers.items():
        survey.names[rank] = {int(to): addresses for to, addresses in answer["names"].items()}
        survey.reached[rank] = [tuple(wrong) for wrong in answer["reached"]]
        survey.routes[rank] = {int(to): interface for to, interface in answer["routes"].items()}

    plan = pair_rounds(len(hellos))
    seconds = min(1.0, PAIR_SECONDS / 2 / len(plan))
    for pairs in plan:
        survey.pairs += measure_pairs(pairs, survey, ask, seconds)
    # measured again, alone: noise is not a fault
    for pair in sorted(_doubtful(survey.pairs), key=lambda p: (p.a, p.b)):
        again = measure_pairs([(pair.a, pair.b)], survey, ask, seconds)
        if again:
            survey.pairs[survey.pairs.index(pair)] = better_measurement(pair, again[0])
    return survey


def _knocking(rank: int, survey: Survey) -> dict[str, Any]:
    """What a node connects to: every port of every other node, those that Gloo and NCCL will get at the
    address that they will use, and the host names that it looks up."""
    doors: dict[int, tuple[str, list[int]]] = {}
    free: dict[int, tuple[str, list[int]]] = {}
    names: dict[int, str] = {}
    for other, hello in survey.hellos.items():
        if other != rank:
            doors[other] = (survey.addresses[other], [hello["port"], *hello["ports"]])
            free[other] = (_collectives(survey, other), hello["free"])
            names[other] = hello["name"]
    return {"stage": "ports", "peers": doors, "free": free, "names": names}


def _collectives(survey: Survey, node: int) -> str:
    """The address at which a node's Gloo and NCCL will listen: their variable's, else that of the route."""
    for _, address in survey.hellos[node]["chosen"].values():
        if address != survey.addresses[node]:
            return address
    return survey.addresses[node]


def measure_pairs(pairs: Iterable[tuple[int, int]], survey: Survey, ask: Ask, seconds: float) -> list[Pair]:
    """Measures pairs that share no node, all at once. Those of which one direction is cut are left out."""
    cut = survey.cut()
    measured = []
    reached = []
    datagrams = {}
    forth = {}
    back_again = {}
    for a, b in pairs:
        if (a, b) in cut or (b, a) in cut:
            continue
        reached.append((a, b))
        mtus = sorted(filter(None, (mtu_towards(survey, a, b), mtu_towards(survey, b, a))))
        largest = min(mtus[0], 9000) if mtus else 1500
        datagrams[a] = _order("datagrams", survey, b, mtu=largest)
        forth[a] = _order("stream", survey, b, seconds=seconds)
        back_again[b] = _order("stream", survey, a, seconds=seconds)

    # One after the other: a stream beside a stream would measure half of the link.
    flights = ask(datagrams)
    out = ask(forth)
    back = ask(back_again)
    for a, b in reached:
        flight = flights[a]
        speeds = (out[a]["bytes_per_s"], back[b]["bytes_per_s"])
        if not flight["udp"]:
            measured.append(Pair(a, b, bytes_per_s=speeds, udp=False))
            continue
        loss = (flight["loss_out"], flight["loss_back"])
        measured.append(Pair(a, b, flight["min_s"] * 1e3, loss, flight["carries"], speeds))
    return measured


def _order(stage: str, survey: Survey, to: int, **more: Any) -> dict[str, Any]:
    hello = survey.hellos[to]
    place = {"address": survey.addresses[to], "port": hello["port"], "udp": hello["udp"]}
    return {"stage": stage, "seconds": 0.0} | place | more


def mtu_towards(survey: Survey, node: int, peer: int) -> int:
    """MTU of the interface that a node uses towards a peer; 0 if unknown."""
    name = interface_towards(survey.hellos[node], survey.routes[node].get(peer, ""))
    return survey.hellos[node]["mtu"].get(name, 0)


def interface_towards(hello: dict[str, Any], address: str) -> str:
    return next((name for name, own in hello["interfaces"].items() if own == address), "")


def better_measurement(first: Pair, second: Pair) -> Pair:
    """The better of two measurements of a pair, figure by figure."""
    trip_ms = min(filter(None, (first.round_trip_ms, second.round_trip_ms)), default=0.0)
    out, back = map(max, first.bytes_per_s, second.bytes_per_s)
    lost, lost_back = map(min, first.loss, second.loss)
    carries = first.carries or second.carries
    return Pair(first.a, first.b, trip_ms, (lost, lost_back), carries, (out, back), first.udp or second.udp)


def _doubtful(pairs: list[Pair]) -> list[Pair]:
    limit = thresholds.SLOW_PAIR_WARN * usual_speed(pairs)
    doubtful: list[Pair] = []
    for p in pairs:
        slow = min(p.bytes_per_s) < limit or p.round_trip_ms > thresholds.ROUND_TRIP_WARN_MS
        if slow or max(p.loss) >= thresholds.LOSS_WARN or not p.carries:
            doubtful.append(p)
    return doubtful


def usual_speed(pairs: list[Pair]) -> float:
    """Bandwidth of the faster pairs: a quarter of the way down, so that one slow node does not move it."""
    speeds = sorted((min(p.bytes_per_s) for p in pairs), reverse=True)
    return speeds[len(speeds) // 4] if speeds else 0.0
