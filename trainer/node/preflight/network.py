"""The network between the nodes: measures every pair in rounds and names a bad node or pair.

`survey` measures, `judge` is a pure function of what was measured.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from trainer.node.preflight import targets
from trainer.node.preflight.findings import Finding, Level
from trainer.node.preflight.probe import rounds

Orders = Mapping[int, dict[str, Any]]
Ask = Callable[[Orders], dict[int, dict[str, Any]]]
"""Sends every named node its order and returns the replies by rank; `offset_s` is added to those about the
clock."""

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
    pairs: list[Pair] = field(default_factory=list)

    def cut(self) -> set[tuple[int, int]]:
        """Directions in which a node reaches no port of the other."""
        found = set()
        for source, wrong in self.reached.items():
            lost: Counter[int] = Counter()
            for to, address, *_ in wrong:
                lost[to] += address == self.addresses[to]
            for to, hello in self.hellos.items():
                # the port at which the other nodes find it, and the others
                if lost[to] >= 1 + len(hello["ports"]):
                    found.add((source, to))
        return found


def survey(hellos: dict[int, dict[str, Any]], addresses: dict[int, str], ask: Ask) -> Survey:
    """Measures everything: clocks, then ports from everyone to everyone, then every pair."""
    found = Survey(hellos, addresses)
    clocks = ask(dict.fromkeys(hellos, {"stage": "clock"}))
    for rank, clock in clocks.items():
        found.offsets_s[rank] = clock["offset_s"]

    answers = ask({rank: {"stage": "ports", "peers": _doors(rank, found)} for rank in hellos})
    for rank, answer in answers.items():
        found.reached[rank] = [tuple(wrong) for wrong in answer["reached"]]
        found.routes[rank] = {int(to): interface for to, interface in answer["routes"].items()}

    plan = rounds(len(hellos))
    seconds = min(1.0, PAIR_SECONDS / 2 / len(plan))
    for pairs in plan:
        found.pairs += measure_pairs(pairs, found, ask, seconds)
    # measured again, alone: noise is not a fault
    for pair in sorted(_doubtful(found.pairs), key=lambda p: (p.a, p.b)):
        again = measure_pairs([(pair.a, pair.b)], found, ask, seconds)
        if again:
            found.pairs[found.pairs.index(pair)] = better(pair, again[0])
    return found


def _doors(rank: int, found: Survey) -> dict[int, tuple[str, list[int]]]:
    """What a node connects to: every port of every other node, and the addresses chosen for NCCL and Gloo."""
    doors: dict[int, tuple[str, list[int]]] = {}
    for other, hello in found.hellos.items():
        if other != rank:
            doors[other] = (found.addresses[other], [hello["port"], *hello["ports"]])
    return doors


def measure_pairs(pairs: Iterable[tuple[int, int]], found: Survey, ask: Ask, seconds: float) -> list[Pair]:
    """Measures pairs that share no node, all at once. Those of which one direction is cut are left out."""
    cut = found.cut()
    measured = []
    reached = []
    datagrams = {}
    forth = {}
    back_again = {}
    for a, b in pairs:
        if (a, b) in cut or (b, a) in cut:
            continue
        reached.append((a, b))
        mtus = sorted(filter(None, (_mtu(found, a, b), _mtu(found, b, a))))
        largest = min(mtus[0], 9000) if mtus else 1500
        datagrams[a] = _order("datagrams", found, b, mtu=largest)
        forth[a] = _order("stream", found, b, seconds=seconds)
        back_again[b] = _order("stream", found, a, seconds=seconds)

    # One after the other: a stream beside a stream would measure half of the link.
    flights = ask(datagrams)
    there = ask(forth)
    back = ask(back_again)
    for a, b in reached:
        flight = flights[a]
        speeds = (there[a]["bytes_per_s"], back[b]["bytes_per_s"])
        if not flight["udp"]:
            measured.append(Pair(a, b, bytes_per_s=speeds, udp=False))
            continue
        loss = (flight["loss_out"], flight["loss_back"])
        measured.append(Pair(a, b, flight["min_s"] * 1e3, loss, flight["carries"], speeds))
    return measured


def _order(stage: str, found: Survey, to: int, **more: Any) -> dict[str, Any]:
    hello = found.hellos[to]
    return {
        "stage": stage,
        "address": found.addresses[to],
        "port": hello["port"],
        "udp": hello["udp"],
        "seconds": 0.0,
    } | more


def _mtu(found: Survey, node: int, peer: int) -> int:
    """MTU of the interface that a node uses towards a peer; 0 if unknown."""
    name = _interface(found.hellos[node], found.routes[node].get(peer, ""))
    return found.hellos[node]["mtu"].get(name, 0)


def _interface(hello: dict[str, Any], address: str) -> str:
    for name, own in hello["interfaces"].items():
        if own == address:
            return name
    return ""


def better(one: Pair, two: Pair) -> Pair:
    """The better of two measurements of a pair, figure by figure."""
    trips = filter(None, (one.round_trip_ms, two.round_trip_ms))
    best = (max(one.bytes_per_s[0], two.bytes_per_s[0]), max(one.bytes_per_s[1], two.bytes_per_s[1]))
    least = (min(one.loss[0], two.loss[0]), min(one.loss[1], two.loss[1]))
    return replace(
        one,
        round_trip_ms=min(trips, default=0.0),
        loss=least,
        bytes_per_s=best,
        carries=one.carries or two.carries,
        udp=one.udp or two.udp,
    )


# --- checks ---------------------------------------------------------------------------------------------


def judge(found: Survey, gpus: bool) -> list[Finding]:
    """All findings on the network. gpus: hold bandwidth against what training on GPUs over TCP needs."""
    return [
        *_interfaces(found),
        *_clocks(found),
        *_ports(found),
        *_mtus(found),
        *_quality(found),
        *_bandwidth(found, gpus),
    ]


def blame(bad: Iterable[tuple[int, int]], nodes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes all of whose pairs are bad while others are good, and the bad pairs that they do not explain."""
    bad = set(bad)
    touched = set(map(frozenset, bad))
    if nodes < 3 or len(touched) == nodes * (nodes - 1) // 2:
        return [], sorted(bad)
    bad_pairs = Counter(chain.from_iterable(touched))
    guilty = []
    for node in range(nodes):
        if bad_pairs[node] == nodes - 1:
            guilty.append(node)

    rest = []
    for pair in sorted(bad):
        if not set(pair) & set(guilty):
            rest.append(pair)
    return guilty, rest


def blamed(bad: Iterable[tuple[int, int]], nodes: int) -> list[tuple[int, ...]]:
    """The nodes and the pairs that `blame` gives, in one list: (node,), then (node, node)."""
    guilty, rest = blame(bad, nodes)
    return [*[(node,) for node in guilty], *rest]


def _doubtful(pairs: list[Pair]) -> list[Pair]:
    limit = targets.SLOW_PAIR_WARN.value * _usual(pairs)
    found: list[Pair] = []
    for p in pairs:
        if (
            min(p.bytes_per_s) < limit
            or max(p.loss) >= targets.LOSS_WARN.value
            or not p.carries
            or p.round_trip_ms > targets.ROUND_TRIP_WARN_MS.value
        ):
            found.append(p)
    return found


def _usual(pairs: list[Pair]) -> float:
    """Bandwidth that the faster pairs reach: a quarter of the way down, so that one slow node does not move
    it."""
    speeds = sorted((min(p.bytes_per_s) for p in pairs), reverse=True)
    return speeds[len(speeds) // 4] if speeds else 0.0


def _interfaces(found: Survey) -> list[Finding]:
    out: list[Finding] = []
    for rank, hello in found.hellos.items():
        ours = sorted(set(found.routes[rank].values()))
        name = _interface(hello, ours[0]) if ours else ""
        wrong = _misleading_variables(found, rank, name)
        if len(ours) > 1:
            figure = f"it reaches the other nodes over several of its addresses: {', '.join(ours)}"
            remedy = "give all nodes addresses on one network in SPOTRL_PEERS"
            wrong.append(_warn("interface", (rank,), figure, remedy))
        if not hello["resolves"]:
            figure = "its own host name does not resolve"
            remedy = "add it to /etc/hosts: Gloo and vLLM look it up"
            wrong.append(_warn("host name", (rank,), figure, remedy))
        if hello["taken"]:
            figure = f"ports {', '.join(map(str, hello['taken']))} are taken"
            wrong.append(_fail("ports", (rank,), figure, "end what listens there", machine=False))
        out += wrong or [Finding(check="interface", nodes=(rank,), figure=name or "unknown")]
    return out


def _misleading_variables(found: Survey, rank: int, route: str) -> list[Finding]:
    """The node's variables for NCCL and Gloo that name an interface over which no other node is reached.

    route: the interface of the route to the other nodes.
    """
    out = []
    for variable, (chosen, address) in found.hellos[rank]["chosen"].items():
        same = []
        for other, hello in found.hellos.items():
            if other != rank and address in hello["interfaces"].values():
                same.append(other)

        if chosen != route and (same or address.startswith("127.")):
            what = f"an address that node {same[0]} has, too" if same else "loopback"
            figure = (
                f"{variable} names {chosen} ({address}), {what}: it leads nowhere, and the route to "
                f"the other nodes is {route}"
            )
            remedy = f"unset {variable}, or set it to {route}"
            out.append(_fail("interface", (rank,), figure, remedy, machine=False))
    return out


def _clocks(found: Survey) -> list[Finding]:
    out = []
    for rank, offset in found.offsets_s.items():
        if rank == 0:
            continue
        level = _level(abs(offset), targets.CLOCK_WARN_S.value, targets.CLOCK_FAIL_S.value)
        figure = f"{offset:+.1f} s" if level == "pass" else f"its clock is {offset:+.0f} s off the head's"
        out.append(
            Finding(
                check="clock",
                nodes=(rank,),
                level=level,
                figure=figure,
                target=f"{targets.CLOCK_WARN_S.value} s",
                remedy="" if level == "pass" else "start NTP (chronyd) on both",
            )
        )
    return out


def _ports(found: Survey) -> list[Finding]:
    out = []
    cut = found.cut()
    count = len(found.hellos)
    both_ways = {pair for pair in cut if pair[::-1] in cut}
    guilty, rest = blame(both_ways, count)
    for node in guilty:
        figure = "it and the other nodes reach none of each other's ports"
        out.append(_fail("ports", (node,), figure, "open all TCP between the nodes, or take another machine"))
    unexplained = set()
    for pair in cut:
        if not set(pair) & set(guilty):
            unexplained.add((min(pair), max(pair)))
    for a, b in sorted(unexplained):
        both = (a, b) in rest and (b, a) in rest
        source, to = (a, b) if (a, b) in cut else (b, a)
        figure = (
            "no connection either way" if both else f"no connection to any port, though node {to} reaches it"
        )
        out.append(
            _fail("ports", (source, to), figure, "open all TCP between the nodes (security group, firewall)")
        )
    for source, wrong in found.reached.items():
        for to in found.hellos:
            ports = []
            reasons = []
            for node, _, port, reason in wrong:
                if node == to:
                    ports.append(str(port))
                    reasons.append(reason)
            if ports and (source, to) not in cut:
                figure = f"port {', '.join(ports)} of {found.addresses[to]}: {reasons[0]}"
                out.append(_fail("ports", (source, to), figure, "open all TCP between the nodes"))
    if not out:
        ports = sum(1 + len(h["ports"]) for h in found.hellos.values())
        out.append(Finding(check="ports", figure=f"{ports} ports, from every node"))
    return out


def _mtus(found: Survey) -> list[Finding]:
    out = []
    sizes = {}
    for rank in found.hellos:
        sizes[rank] = 0
        for peer in found.hellos:
            if peer != rank:
                sizes[rank] = max(sizes[rank], _mtu(found, rank, peer))

    usual = statistics.mode(sizes.values())
    for rank, size in sizes.items():
        if size != usual:
            figure = f"its interface has MTU {size}, the others {usual}"
            out.append(_warn("MTU", (rank,), figure, "give all nodes' interfaces the same MTU"))
    too_narrow = [(pair.a, pair.b) for pair in found.pairs if not pair.carries]
    for nodes in blamed(too_narrow, len(found.hellos)):
        size = min(sizes[n] for n in nodes)
        figure = f"packets of {size} bytes do not arrive, small ones do"
        out.append(_fail("MTU", nodes, figure, "lower the interfaces' MTU to what the network carries"))
    return out or [Finding(check="MTU", figure=f"{usual} bytes")]


def _quality(found: Survey) -> list[Finding]:
    out = []
    count = len(found.hellos)
    limit = targets.LOSS_WARN.value
    levels = {}
    loss = {}
    for p in found.pairs:
        loss[(p.a, p.b)] = p.loss
        levels[(p.a, p.b)] = _level(max(p.loss), limit, targets.LOSS_FAIL.value)
    for level in ("fail", "warn"):
        guilty, rest = blame([p for p, at in levels.items() if at == level], count)
        for node in guilty:
            worst = max(max(share) for pair, share in loss.items() if node in pair)
            out.append(_lossy((node,), worst, level))
        for pair in rest:
            there, back = loss[pair]
            out.append(_lossy(pair if there >= back else pair[::-1], max(there, back), level))
    slow = {}
    for p in found.pairs:
        if p.round_trip_ms > targets.ROUND_TRIP_WARN_MS.value:
            slow[(p.a, p.b)] = p

    for nodes in blamed(slow, count):
        best = max(p.round_trip_ms for p in slow.values() if set(nodes) <= {p.a, p.b})
        figure = f"a round trip takes {best:.1f} ms at best"
        out.append(_warn("round trip", nodes, figure, "are the nodes in one zone, and on one network?"))
    if not out and found.pairs:
        trips = [p.round_trip_ms for p in found.pairs]
        measured = all(p.udp for p in found.pairs)
        figure = (
            f"{min(trips):.2f} to {max(trips):.2f} ms" if measured else "not measured: datagrams are blocked"
        )
        worst = max(map(max, loss.values()))
        out += [Finding(check="round trip", figure=figure, target=f"{targets.ROUND_TRIP_WARN_MS.value} ms")]
        out += [Finding(check="loss", figure=f"{worst:.2%}" if measured else figure, target=f"< {limit:.1%}")]
    return out


def _lossy(nodes: tuple[int, ...], share: float, level: Level) -> Finding:
    remedy = "a cable, a port or a congested switch: take another machine"
    figure = f"{share:.1%} of the packets are lost"
    target = f"< {targets.LOSS_WARN.value:.1%}"
    return Finding(check="loss", nodes=nodes, level=level, figure=figure, target=target, remedy=remedy)


def _bandwidth(found: Survey, gpus: bool) -> list[Finding]:
    if not found.pairs:
        return []
    out: list[Finding] = []
    usual = _usual(found.pairs)
    count = len(found.hellos)
    speed = {(p.a, p.b): min(p.bytes_per_s) for p in found.pairs}
    limits: list[tuple[Level, float]] = [
        ("fail", targets.SLOW_PAIR_FAIL.value * usual),
        ("warn", targets.SLOW_PAIR_WARN.value * usual),
    ]
    named: set[tuple[int, int]] = set()
    for level, limit in limits:
        below = [pair for pair, slowest in speed.items() if slowest < limit and pair not in named]
        for nodes in blamed(below, count):
            inside = {pair: slowest for pair, slowest in speed.items() if set(nodes) <= set(pair)}
            named |= inside.keys()
            figure = f"{gbit(min(inside.values()))}, the other pairs {gbit(usual)}"
            remedy = "take another machine, or look at its cable, switch port and virtual network card"
            out.append(
                Finding(
                    check="bandwidth",
                    nodes=nodes,
                    level=level,
                    figure=figure,
                    remedy=remedy,
                    target=f"{targets.SLOW_PAIR_WARN.value:.0%} of the other pairs",
                )
            )
    floor = targets.ETHERNET_GBIT_PER_S.value
    if gpus and usual * 8e-9 < targets.ETHERNET_SHARE.value * floor:
        figure = f"{gbit(usual)} between nodes over TCP"
        remedy = "ask for a faster network tier, or train on one node: ZeRO-3 gathers all weights over it"
        target = f"a {floor:.0f} Gb/s link"
        out.append(Finding(check="bandwidth", level="fail", figure=figure, target=target, remedy=remedy))
    if not out:
        figure = f"{gbit(min(speed.values()))} to {gbit(max(speed.values()))}"
        target = (
            f"a {floor:.0f} Gb/s link" if gpus else f"{targets.SLOW_PAIR_WARN.value:.0%} of the other pairs"
        )
        out.append(Finding(check="bandwidth", figure=figure, target=target))
    return out


def gbit(bytes_per_s: float) -> str:
    """Bytes per second in words."""
    return f"{bytes_per_s * 8e-9:.2f} Gb/s"


def _level(value: float, warn: float, fail: float) -> Level:
    return "fail" if value > fail else "warn" if value > warn else "pass"


WANTED = {
    "interface": "one network, shared by all nodes",
    "host name": "it resolves",
    "ports": "every port of every node, both ways",
    "MTU": "alike on all nodes, and it carries",
    "round trip": f"{targets.ROUND_TRIP_WARN_MS.value} ms",
}
"""Targets of checks that measure no number, and of failures of them."""


def _warn(check: str, nodes: tuple[int, ...], figure: str, remedy: str) -> Finding:
    return Finding(check=check, nodes=nodes, level="warn", figure=figure, target=WANTED[check], remedy=remedy)


def _fail(check: str, nodes: tuple[int, ...], figure: str, remedy: str, machine: bool = True) -> Finding:
    return Finding(
        check=check,
        nodes=nodes,
        level="fail",
        figure=figure,
        target=WANTED[check],
        remedy=remedy,
        machine=machine,
    )
