"""What a survey of the network means: pure functions to findings that name a node or a pair."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from trainer.node.preflight import thresholds
from trainer.node.preflight.findings import Finding, Level, judged
from trainer.node.preflight.network import Pair, Survey, interface_towards, mtu_towards, usual_speed

Edges = Iterable[tuple[int, int]]


def judge_network(survey: Survey, gpus: bool) -> list[Finding]:
    """All findings on the network. gpus: hold bandwidth against what training on GPUs over TCP needs."""
    out: list[Finding] = []
    for rank in survey.hellos:
        out += _interfaces(survey, rank)
    for rank, offset in survey.offsets_s.items():
        if rank:
            level = _level(abs(offset), thresholds.CLOCK_WARN_S, thresholds.CLOCK_FAIL_S)
            wrong = f"its clock is {offset:+.0f} s off the head's" if level != "pass" else ""
            out.append(judged("clock", (rank,), wrong, f"{offset:+.1f} s", level=level))
    return [*out, *_ports(survey), *_mtus(survey), *_quality(survey), *_bandwidth(survey, gpus)]


def explain_bad_pairs(bad: Edges, nodes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes all of whose pairs are bad while others are good, and the bad pairs that they do not explain."""
    bad = set(bad)
    if nodes < 3 or are_all_pairs(bad, nodes):
        return [], sorted(bad)
    bad_pairs = Counter(chain.from_iterable(set(map(frozenset, bad))))
    guilty = [node for node in range(nodes) if bad_pairs[node] == nodes - 1]
    return guilty, sorted(pair for pair in bad if not set(pair) & set(guilty))


def are_all_pairs(bad: Edges, nodes: int) -> bool:
    """Whether every pair of the job is bad, as a rule of the network makes it: other machines share it."""
    return len(set(map(frozenset, bad))) == nodes * (nodes - 1) // 2


def bad_nodes_and_pairs(bad: Edges, nodes: int) -> list[tuple[int, ...]]:
    """The nodes and the pairs that `explain_bad_pairs` gives, in one list: (node,), then (node, node)."""
    guilty, rest = explain_bad_pairs(bad, nodes)
    return [*[(node,) for node in guilty], *rest]


def _interfaces(survey: Survey, rank: int) -> list[Finding]:
    """Findings on one node's interface, its variables, its host name and its own ports."""
    hello = survey.hellos[rank]
    ours = sorted(set(survey.routes[rank].values()))
    name = interface_towards(hello, ours[0]) if ours else ""
    wrong = _misleading_variables(survey, rank, name)
    if len(ours) > 1:
        figure = f"it reaches the other nodes over several of its addresses: {', '.join(ours)}"
        remedy = "give all nodes addresses on one network in SPOTRL_PEERS"
        wrong.append(judged("interface", (rank,), figure, remedy=remedy, level="warn"))
    wrong += [judged("interface", (rank,), why) for why in hello["wrong"]]
    wrong += _host_names(survey, rank)
    if hello["taken"]:
        figure = f"ports {', '.join(map(str, hello['taken']))} are taken"
        wrong.append(judged("ports", (rank,), figure, remedy="end what listens there", machine=False))
    return wrong or [judged("interface", (rank,), "", name or "unknown")]


def _host_names(survey: Survey, rank: int) -> list[Finding]:
    """A node's own name must lead to itself, and no other node's name to a third."""
    hello = survey.hellos[rank]
    own = hello["resolves"]
    out = []
    if not own:
        remedy = "add it to /etc/hosts: Gloo and vLLM look it up"
        figure = "its own host name does not resolve"
        out.append(judged("host name", (rank,), figure, remedy=remedy, level="warn"))
    elif not any(address in hello["addresses"] or address.startswith("127.") for address in own):
        figure = f"its own host name {hello['name']} resolves to {', '.join(own)}, which is not its address"
        out.append(judged("host name", (rank,), figure))
    for other, addresses in survey.names.get(rank, {}).items():
        for third, theirs in survey.addresses.items():
            if third != other and theirs in addresses and theirs not in survey.hellos[other]["addresses"]:
                name = survey.hellos[other]["name"]
                figure = f"it resolves {name}, which is node {other}, to {theirs}, which is node {third}"
                out.append(judged("host name", (rank,), figure))
    return out


def duplicate_addresses(
    hellos: Mapping[int, Mapping[str, Any]], addresses: Mapping[int, str]
) -> list[Finding]:
    """Addresses of one node that another has as well: what is sent there arrives at either."""
    out = []
    for rank, address in addresses.items():
        for other, hello in hellos.items():
            taken = address in hello["addresses"] or (addresses[other] == address and other > rank)
            if other != rank and taken and not address.startswith("127."):
                out.append(judged("address", (rank, other), f"both have the address {address}"))
    return out


def _misleading_variables(survey: Survey, rank: int, route: str) -> list[Finding]:
    """The node's variables for NCCL and Gloo that name an interface over which no other node is reached.

    route: the interface of the route to the other nodes.
    """
    out = []
    for variable, (chosen, address) in survey.hellos[rank]["chosen"].items():
        same = []
        for other, hello in survey.hellos.items():
            if other != rank and address in hello["interfaces"].values():
                same.append(other)
        if chosen == route or not (same or address.startswith("127.")):
            continue
        owner = f"an address that node {same[0]} has, too" if same else "loopback"
        figure = (
            f"{variable} names {chosen} ({address}), {owner}: it leads nowhere, and the route to the other"
        )
        remedy = f"unset {variable}, or set it to {route}"
        out.append(judged("interface", (rank,), f"{figure} nodes is {route}", remedy=remedy))
    return out


def _ports(survey: Survey) -> list[Finding]:
    cut = survey.cut()
    count = len(survey.hellos)
    guilty, rest = explain_bad_pairs({pair for pair in cut if pair[::-1] in cut}, count)
    out = []
    for node in guilty:
        remedy = "open all TCP between the nodes, or take another machine"
        figure = "it and the other nodes reach none of each other's ports"
        out.append(judged("ports", (node,), figure, remedy=remedy))
    own = not are_all_pairs(cut, count)
    for a, b in sorted({(min(pair), max(pair)) for pair in cut if not set(pair) & set(guilty)}):
        source, to = (a, b) if (a, b) in cut else (b, a)
        one_way = f"no connection to any port, though node {to} reaches it"
        both = (a, b) in rest and (b, a) in rest
        figure = "no connection either way" if both else one_way
        out.append(judged("ports", (source, to), figure, machine=own))
    out += _free_ports(survey, cut)

    closed: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for source, wrong in survey.reached.items():
        for to, _, port, reason in wrong:
            closed.setdefault((source, to), [])
            if port not in survey.hellos[to]["free"]:
                closed[source, to].append((port, reason))
    own = not are_all_pairs(closed, count)
    for (source, to), refused in closed.items():
        if refused and (source, to) not in cut:
            ports = ", ".join(str(port) for port, _ in refused)
            figure = f"port {ports} of {survey.addresses[to]}: {refused[0][1]}"
            out.append(judged("ports", (source, to), figure, machine=own))
    ports = sum(1 + len(hello["ports"]) + len(hello["free"]) for hello in survey.hellos.values())
    return out or [judged("ports", (), "", f"{ports} ports, from every node")]


def _free_ports(survey: Survey, cut: set[tuple[int, int]]) -> list[Finding]:
    """Nodes whose ports of the system's own range, where Gloo, NCCL and Ray listen, are not reached."""
    lost: dict[tuple[int, int], tuple[str, str, list[str]]] = {}
    for source, wrong in survey.reached.items():
        for to, address, port, reason in wrong:
            if port in survey.hellos[to]["free"] and (source, to) not in cut:
                lost.setdefault((source, to), (address, reason, []))[2].append(str(port))
    out = []
    remedy = "open all TCP between the nodes (sysctl net.ipv4.ip_local_port_range has the range)"
    own = not are_all_pairs(lost, len(survey.hellos))
    for to in survey.hellos:
        sources = sorted(source for source, at in lost if at == to)
        if not sources:
            continue
        address, reason, ports = lost[sources[0], to]
        figure = f"ports {', '.join(ports)} of {address}, such as Gloo and NCCL get: {reason}"
        everyone = 2 < len(survey.hellos) == len(sources) + 1
        for nodes in [(to,)] if everyone else [(source, to) for source in sources]:
            whole = f"no other node reaches {figure}" if everyone else figure
            out.append(judged("ports", nodes, whole, remedy=remedy, machine=own))
    return out


def _mtus(survey: Survey) -> list[Finding]:
    out = []
    sizes = {}
    for rank in survey.hellos:
        sizes[rank] = max(
            (mtu_towards(survey, rank, peer) for peer in survey.hellos if peer != rank), default=0
        )
    usual = statistics.mode(sizes.values())
    for rank, size in sizes.items():
        if size != usual:
            remedy = "give all nodes' interfaces the same MTU"
            figure = f"its interface has MTU {size}, the others {usual}"
            out.append(judged("MTU", (rank,), figure, remedy=remedy, level="warn"))
    too_narrow = [(pair.a, pair.b) for pair in survey.pairs if not pair.carries]
    own = not are_all_pairs(too_narrow, len(survey.hellos))
    for nodes in bad_nodes_and_pairs(too_narrow, len(survey.hellos)):
        figure = f"packets of {min(sizes[node] for node in nodes)} bytes do not arrive, small ones do"
        out.append(judged("MTU", nodes, figure, machine=own))
    return out or [judged("MTU", (), "", f"{usual} bytes")]


def _bad_links(
    survey: Survey, check: str, level_of: Callable[[Pair], Level], words: Callable[[list[Pair]], str]
) -> list[Finding]:
    """Findings on the nodes and pairs whose links fail or warn. words: what is wrong with some links."""
    out = []
    explained: set[tuple[int, int]] = set()
    for level in ("fail", "warn"):
        bad = {(p.a, p.b): p for p in survey.pairs if level_of(p) == level and (p.a, p.b) not in explained}
        for nodes in bad_nodes_and_pairs(bad, len(survey.hellos)):
            links = [p for p in survey.pairs if set(nodes) <= {p.a, p.b}]
            explained |= {(p.a, p.b) for p in links}
            out.append(judged(check, nodes, words(links), level=level))
    return out


def _quality(survey: Survey) -> list[Finding]:
    """Findings on loss and round trips."""

    def lossy(pair: Pair) -> Level:
        return _level(max(pair.loss), thresholds.LOSS_WARN, thresholds.LOSS_FAIL)

    def slow(pair: Pair) -> Level:
        return "warn" if pair.round_trip_ms > thresholds.ROUND_TRIP_WARN_MS else "pass"

    def lost(links: list[Pair]) -> str:
        return f"{max(max(pair.loss) for pair in links):.1%} of the packets are lost"

    def late(links: list[Pair]) -> str:
        return f"a round trip takes {max(pair.round_trip_ms for pair in links):.1f} ms at best"

    out = []
    backwards = {(p.a, p.b) for p in survey.pairs if p.loss[1] > p.loss[0]}
    for finding in _bad_links(survey, "loss", lossy, lost):
        turned = finding.nodes[::-1] if finding.nodes in backwards else finding.nodes
        out.append(judged("loss", turned, finding.figure, level=finding.level))
    out += _bad_links(survey, "round trip", slow, late)
    if out or not survey.pairs:
        return out
    trips = [pair.round_trip_ms for pair in survey.pairs]
    figure = f"{min(trips):.2f} to {max(trips):.2f} ms"
    share = f"{max(max(pair.loss) for pair in survey.pairs):.2%}"
    if not all(pair.udp for pair in survey.pairs):
        figure = share = "not measured: datagrams are blocked"
    return [judged("round trip", (), "", figure), judged("loss", (), "", share)]


def _bandwidth(survey: Survey, gpus: bool) -> list[Finding]:
    if not survey.pairs:
        return []
    usual = usual_speed(survey.pairs)
    speeds = [min(pair.bytes_per_s) for pair in survey.pairs]

    def level(pair: Pair) -> Level:
        slowest = min(pair.bytes_per_s)
        failed = slowest < thresholds.SLOW_PAIR_FAIL * usual
        return "fail" if failed else "warn" if slowest < thresholds.SLOW_PAIR_WARN * usual else "pass"

    def words(links: list[Pair]) -> str:
        return f"{_gbit(min(min(pair.bytes_per_s) for pair in links))}, the other pairs {_gbit(usual)}"

    out = _bad_links(survey, "bandwidth", level, words)
    floor = thresholds.ETHERNET_GBIT_PER_S
    target = f"a {floor:.0f} Gb/s link" if gpus else ""
    if gpus and usual * 8e-9 < thresholds.ETHERNET_SHARE * floor:
        figure = f"{_gbit(usual)} between nodes over TCP"
        remedy = "ask for a faster network tier, or train on one node: ZeRO-3 gathers all weights over it"
        out.append(judged("bandwidth", (), figure, "", target, remedy, machine=False))
    return out or [judged("bandwidth", (), "", f"{_gbit(min(speeds))} to {_gbit(max(speeds))}", target)]


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.2f} Gb/s"


def _level(value: float, warn: float, fail: float) -> Level:
    return "fail" if value > fail else "warn" if value > warn else "pass"
