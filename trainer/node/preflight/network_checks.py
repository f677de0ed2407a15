"""What a survey of the network means: pure functions from what was measured to findings that name a node or a
pair."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from trainer.node.preflight import thresholds
from trainer.node.preflight.findings import Finding, Level
from trainer.node.preflight.network import Survey, interface_towards, mtu_towards, usual_speed


def judge_network(found: Survey, gpus: bool) -> list[Finding]:
    """All findings on the network. gpus: hold bandwidth against what training on GPUs over TCP needs."""
    return [
        *_interfaces(found),
        *_clocks(found),
        *_ports(found),
        *_mtus(found),
        *_quality(found),
        *_bandwidth(found, gpus),
    ]


def explain_bad_pairs(bad: Iterable[tuple[int, int]], nodes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes all of whose pairs are bad while others are good, and the bad pairs that they do not explain."""
    bad = set(bad)
    touched = set(map(frozenset, bad))
    if nodes < 3 or are_all_pairs(bad, nodes):
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


def are_all_pairs(bad: Iterable[tuple[int, int]], nodes: int) -> bool:
    """Whether every pair of the job is bad, as a rule of the network makes it: other machines share it."""
    return len(set(map(frozenset, bad))) == nodes * (nodes - 1) // 2


def bad_nodes_and_pairs(bad: Iterable[tuple[int, int]], nodes: int) -> list[tuple[int, ...]]:
    """The nodes and the pairs that `explain_bad_pairs` gives, in one list: (node,), then (node, node)."""
    guilty, rest = explain_bad_pairs(bad, nodes)
    return [*[(node,) for node in guilty], *rest]


def _interfaces(found: Survey) -> list[Finding]:
    out: list[Finding] = []
    for rank, hello in found.hellos.items():
        ours = sorted(set(found.routes[rank].values()))
        name = interface_towards(hello, ours[0]) if ours else ""
        wrong = _misleading_variables(found, rank, name)
        if len(ours) > 1:
            figure = f"it reaches the other nodes over several of its addresses: {', '.join(ours)}"
            remedy = "give all nodes addresses on one network in SPOTRL_PEERS"
            wrong.append(_warn("interface", (rank,), figure, remedy))
        for why in hello["wrong"]:
            wrong.append(_fail("interface", (rank,), why, "set it on no node, or alike"))
        wrong += _host_names(found, rank)
        if hello["taken"]:
            figure = f"ports {', '.join(map(str, hello['taken']))} are taken"
            wrong.append(_fail("ports", (rank,), figure, "end what listens there", machine=False))
        out += wrong or [Finding(check="interface", nodes=(rank,), figure=name or "unknown")]
    return out


def _host_names(found: Survey, rank: int) -> list[Finding]:
    """A node's own name must lead to itself, and no other node's name to a third."""
    hello = found.hellos[rank]
    own = hello["resolves"]
    out = []
    if not own:
        remedy = "add it to /etc/hosts: Gloo and vLLM look it up"
        out.append(_warn("host name", (rank,), "its own host name does not resolve", remedy))
    elif not any(address in hello["addresses"] or address.startswith("127.") for address in own):
        figure = f"its own host name {hello['name']} resolves to {', '.join(own)}, which is not its address"
        remedy = "correct /etc/hosts or DNS there"
        out.append(_fail("host name", (rank,), figure, remedy))
    for other, addresses in found.names.get(rank, {}).items():
        for third, theirs in found.addresses.items():
            if third != other and theirs in addresses and theirs not in found.hellos[other]["addresses"]:
                name = found.hellos[other]["name"]
                figure = f"it resolves {name}, which is node {other}, to {theirs}, which is node {third}"
                remedy = "correct /etc/hosts or DNS there"
                out.append(_fail("host name", (rank,), figure, remedy))
    return out


def duplicate_addresses(
    hellos: Mapping[int, Mapping[str, Any]], addresses: Mapping[int, str]
) -> list[Finding]:
    """Addresses by which one node is reached and that another node has as well: what is sent there arrives at
    either."""
    out = []
    for rank, address in addresses.items():
        for other, hello in hellos.items():
            taken = address in hello["addresses"] or (addresses[other] == address and other > rank)
            if other != rank and taken and not address.startswith("127."):
                figure = f"both have the address {address}"
                out.append(_fail("address", (rank, other), figure, "give each node its own"))
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
            out.append(_fail("interface", (rank,), figure, remedy))
    return out


def _clocks(found: Survey) -> list[Finding]:
    out = []
    for rank, offset in found.offsets_s.items():
        if rank == 0:
            continue
        level = _level(abs(offset), thresholds.CLOCK_WARN_S.value, thresholds.CLOCK_FAIL_S.value)
        figure = f"{offset:+.1f} s" if level == "pass" else f"its clock is {offset:+.0f} s off the head's"
        out.append(
            Finding(
                check="clock",
                nodes=(rank,),
                level=level,
                figure=figure,
                target=f"{thresholds.CLOCK_WARN_S.value} s",
                remedy="" if level == "pass" else "start NTP (chronyd) on both",
            )
        )
    return out


def _ports(found: Survey) -> list[Finding]:
    out = []
    cut = found.cut()
    count = len(found.hellos)
    both_ways = {pair for pair in cut if pair[::-1] in cut}
    guilty, rest = explain_bad_pairs(both_ways, count)
    for node in guilty:
        figure = "it and the other nodes reach none of each other's ports"
        out.append(_fail("ports", (node,), figure, "open all TCP between the nodes, or take another machine"))
    unexplained = set()
    for pair in cut:
        if not set(pair) & set(guilty):
            unexplained.add((min(pair), max(pair)))
    own = not are_all_pairs(cut, count)
    for a, b in sorted(unexplained):
        both = (a, b) in rest and (b, a) in rest
        source, to = (a, b) if (a, b) in cut else (b, a)
        figure = (
            "no connection either way" if both else f"no connection to any port, though node {to} reaches it"
        )
        remedy = "open all TCP between the nodes (security group, firewall)"
        out.append(_fail("ports", (source, to), figure, remedy, machine=own))
    out += _free_ports(found, cut)
    some_ports = [(source, wrong[0]) for source, reached in found.reached.items() for wrong in reached]
    own = not are_all_pairs(some_ports, count)
    for source, wrong in found.reached.items():
        for to, hello in found.hellos.items():
            ports = []
            reasons = []
            for node, _, port, reason in wrong:
                if node == to and port not in hello["free"]:
                    ports.append(str(port))
                    reasons.append(reason)
            if ports and (source, to) not in cut:
                figure = f"port {', '.join(ports)} of {found.addresses[to]}: {reasons[0]}"
                remedy = "open all TCP between the nodes"
                out.append(_fail("ports", (source, to), figure, remedy, machine=own))
    if not out:
        ports = sum(1 + len(h["ports"]) + len(h["free"]) for h in found.hellos.values())
        out.append(Finding(check="ports", figure=f"{ports} ports, from every node"))
    return out


def _free_ports(found: Survey, cut: set[tuple[int, int]]) -> list[Finding]:
    """Nodes whose ports of the system's own range are not reached: Gloo, NCCL and Ray's workers take theirs
    from there."""
    lost: dict[tuple[int, int], tuple[str, str, list[str]]] = {}
    for source, wrong in found.reached.items():
        for to, address, port, reason in wrong:
            if port in found.hellos[to]["free"] and (source, to) not in cut:
                lost.setdefault((source, to), (address, reason, []))[2].append(str(port))
    out = []
    remedy = "open all TCP between the nodes (sysctl net.ipv4.ip_local_port_range has the range)"
    everyone = set(found.hellos)
    own = not are_all_pairs(lost, len(everyone))
    for to in found.hellos:
        sources = {source for source, at in lost if at == to}
        if not sources:
            continue
        address, reason, ports = lost[min(sources), to]
        figure = f"ports {', '.join(ports)} of {address}, such as Gloo and NCCL get: {reason}"
        if len(everyone) > 2 and sources == everyone - {to}:
            out.append(_fail("ports", (to,), f"no other node reaches {figure}", remedy, machine=own))
        else:
            out += [_fail("ports", (source, to), figure, remedy, machine=own) for source in sorted(sources)]
    return out


def _mtus(found: Survey) -> list[Finding]:
    out = []
    sizes = {}
    for rank in found.hellos:
        sizes[rank] = 0
        for peer in found.hellos:
            if peer != rank:
                sizes[rank] = max(sizes[rank], mtu_towards(found, rank, peer))

    usual = statistics.mode(sizes.values())
    for rank, size in sizes.items():
        if size != usual:
            figure = f"its interface has MTU {size}, the others {usual}"
            out.append(_warn("MTU", (rank,), figure, "give all nodes' interfaces the same MTU"))
    too_narrow = [(pair.a, pair.b) for pair in found.pairs if not pair.carries]
    for nodes in bad_nodes_and_pairs(too_narrow, len(found.hellos)):
        size = min(sizes[n] for n in nodes)
        figure = f"packets of {size} bytes do not arrive, small ones do"
        remedy = "lower the interfaces' MTU to what the network carries"
        own = not are_all_pairs(too_narrow, len(found.hellos))
        out.append(_fail("MTU", nodes, figure, remedy, machine=own))
    return out or [Finding(check="MTU", figure=f"{usual} bytes")]


def _quality(found: Survey) -> list[Finding]:
    out = []
    count = len(found.hellos)
    limit = thresholds.LOSS_WARN.value
    levels = {}
    loss = {}
    for p in found.pairs:
        loss[(p.a, p.b)] = p.loss
        levels[(p.a, p.b)] = _level(max(p.loss), limit, thresholds.LOSS_FAIL.value)
    for level in ("fail", "warn"):
        guilty, rest = explain_bad_pairs([p for p, at in levels.items() if at == level], count)
        for node in guilty:
            worst = max(max(share) for pair, share in loss.items() if node in pair)
            out.append(_lossy((node,), worst, level))
        for pair in rest:
            there, back = loss[pair]
            out.append(_lossy(pair if there >= back else pair[::-1], max(there, back), level))
    slow = {}
    for p in found.pairs:
        if p.round_trip_ms > thresholds.ROUND_TRIP_WARN_MS.value:
            slow[(p.a, p.b)] = p

    for nodes in bad_nodes_and_pairs(slow, count):
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
        out += [
            Finding(check="round trip", figure=figure, target=f"{thresholds.ROUND_TRIP_WARN_MS.value} ms")
        ]
        out += [Finding(check="loss", figure=f"{worst:.2%}" if measured else figure, target=f"< {limit:.1%}")]
    return out


def _lossy(nodes: tuple[int, ...], share: float, level: Level) -> Finding:
    remedy = "a cable, a port or a congested switch: take another machine"
    figure = f"{share:.1%} of the packets are lost"
    target = f"< {thresholds.LOSS_WARN.value:.1%}"
    return Finding(check="loss", nodes=nodes, level=level, figure=figure, target=target, remedy=remedy)


def _bandwidth(found: Survey, gpus: bool) -> list[Finding]:
    if not found.pairs:
        return []
    out: list[Finding] = []
    usual = usual_speed(found.pairs)
    count = len(found.hellos)
    speed = {(p.a, p.b): min(p.bytes_per_s) for p in found.pairs}
    limits: list[tuple[Level, float]] = [
        ("fail", thresholds.SLOW_PAIR_FAIL.value * usual),
        ("warn", thresholds.SLOW_PAIR_WARN.value * usual),
    ]
    named: set[tuple[int, int]] = set()
    for level, limit in limits:
        below = [pair for pair, slowest in speed.items() if slowest < limit and pair not in named]
        for nodes in bad_nodes_and_pairs(below, count):
            inside = {pair: slowest for pair, slowest in speed.items() if set(nodes) <= set(pair)}
            named |= inside.keys()
            figure = f"{format_gbit(min(inside.values()))}, the other pairs {format_gbit(usual)}"
            remedy = "take another machine, or look at its cable, switch port and virtual network card"
            out.append(
                Finding(
                    check="bandwidth",
                    nodes=nodes,
                    level=level,
                    figure=figure,
                    remedy=remedy,
                    target=f"{thresholds.SLOW_PAIR_WARN.value:.0%} of the other pairs",
                )
            )
    floor = thresholds.ETHERNET_GBIT_PER_S.value
    if gpus and usual * 8e-9 < thresholds.ETHERNET_SHARE.value * floor:
        figure = f"{format_gbit(usual)} between nodes over TCP"
        remedy = "ask for a faster network tier, or train on one node: ZeRO-3 gathers all weights over it"
        target = f"a {floor:.0f} Gb/s link"
        out.append(
            Finding(
                check="bandwidth", level="fail", figure=figure, target=target, remedy=remedy, machine=False
            )
        )
    if not out:
        figure = f"{format_gbit(min(speed.values()))} to {format_gbit(max(speed.values()))}"
        target = (
            f"a {floor:.0f} Gb/s link"
            if gpus
            else f"{thresholds.SLOW_PAIR_WARN.value:.0%} of the other pairs"
        )
        out.append(Finding(check="bandwidth", figure=figure, target=target))
    return out


def format_gbit(bytes_per_s: float) -> str:
    """Bytes per second in words."""
    return f"{bytes_per_s * 8e-9:.2f} Gb/s"


def _level(value: float, warn: float, fail: float) -> Level:
    return "fail" if value > fail else "warn" if value > warn else "pass"


WANTED = {
    "interface": "one network, shared by all nodes",
    "host name": "it resolves, and to this node",
    "address": "one node each",
    "ports": "every port of every node, both ways",
    "MTU": "alike on all nodes, and it carries",
    "round trip": f"{thresholds.ROUND_TRIP_WARN_MS.value} ms",
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
