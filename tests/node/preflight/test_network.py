"""The network checks: real probes over loopback, and the judgement on measurements made by hand."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from trainer.node.launch import rendezvous
from trainer.node.preflight import network, probe
from trainer.node.preflight.network import Pair, Survey, better_measurement
from trainer.node.preflight.network_checks import duplicate_addresses, explain_bad_pairs, judge_network
from trainer.node.preflight.probe import Prober, pair_rounds

GBIT = 1e9 / 8


def test_rounds_hold_every_pair_once_and_no_node_twice():
    for nodes in (2, 3, 4, 7, 16):
        plan = pair_rounds(nodes)
        pairs = [pair for one in plan for pair in one]
        assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
        assert all(len({n for pair in one for n in pair}) == 2 * len(one) for one in plan)
        assert len(plan) == nodes - 1 + nodes % 2


@pytest.mark.parametrize(
    ("bad", "nodes", "guilty", "rest"),
    [
        ([(0, 2)], 4, [], [(0, 2)]),
        ([(0, 2), (1, 2), (2, 3)], 4, [2], []),
        ([(0, 2), (1, 2), (2, 3), (0, 1)], 4, [2], [(0, 1)]),
        ([(0, 1)], 2, [], [(0, 1)]),
        ([(0, 1), (0, 2)], 3, [0], []),
        ([(0, 1), (0, 2), (1, 2)], 3, [], [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_a_node_is_blamed_only_if_all_its_pairs_are_bad_and_others_are_good(bad, nodes, guilty, rest):
    assert explain_bad_pairs(bad, nodes) == (guilty, rest)


def measured(nodes: int = 4, **changes) -> Survey:
    """A clean survey of nodes with two interfaces; `changes` replace figures of pairs given as `p02`."""
    ports = {"port": 6381, "ports": [6383, 6384], "udp": 9, "free": [40001, 50001]}
    hellos = {}
    for rank in range(nodes):
        own = f"10.0.0.{rank}"
        hellos[rank] = ports | {
            "taken": [],
            "chosen": {},
            "wrong": [],
            "name": f"gpu{rank}",
            "resolves": [own],
        }
        hellos[rank]["interfaces"] = {"eth0": "172.17.0.2", "eth1": own}
        hellos[rank] |= {"addresses": ["172.17.0.2", own], "mtu": {"eth0": 1500, "eth1": 1500}}
    found = Survey(hellos, {r: f"10.0.0.{r}" for r in hellos})
    found.offsets_s = dict.fromkeys(hellos, 0.01)
    found.reached = {r: [] for r in hellos}
    found.routes = {r: {o: f"10.0.0.{r}" for o in hellos if o != r} for r in hellos}
    for a in range(nodes):
        for b in range(a + 1, nodes):
            found.pairs.append(changes.get(f"p{a}{b}", pair(a, b, gbit=(25, 24))))
    return found


def wrong(found: Survey, gpus: bool = True) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(f.level, f.check, f.nodes) for f in judge_network(found, gpus) if f.level != "pass"]


def failures(found: Survey) -> list:
    return [f for f in judge_network(found, True) if f.level == "fail"]


def test_a_clean_network_passes_every_check():
    findings = judge_network(measured(), gpus=True)
    assert {f.level for f in findings} == {"pass"}
    checks = {"interface", "clock", "ports", "MTU", "round trip", "loss", "bandwidth"}
    assert {f.check for f in findings} == checks


def pair(a: int, b: int, trip_ms: float = 0.2, loss=(0.0, 0.0), carries: bool = True, gbit=(24, 24)) -> Pair:
    return Pair(a, b, trip_ms, loss, carries, (gbit[0] * GBIT, gbit[1] * GBIT))


def all_pairs(gbit: float) -> dict[str, Pair]:
    return {f"p{a}{b}": pair(a, b, gbit=(gbit, gbit)) for a in range(4) for b in range(a + 1, 4)}


@pytest.mark.parametrize(
    ("link", "finding"),
    [
        (pair(0, 2, gbit=(2.5, 24)), ("fail", "bandwidth", (0, 2))),
        (pair(0, 2, gbit=(10, 24)), ("warn", "bandwidth", (0, 2))),
        (pair(0, 2, loss=(0.0, 0.01)), ("fail", "loss", (2, 0))),
        (pair(0, 2, loss=(0.002, 0.0)), ("warn", "loss", (0, 2))),
        (pair(0, 2, carries=False), ("fail", "MTU", (0, 2))),
        (pair(0, 2, 30.0), ("warn", "round trip", (0, 2))),
    ],
)
def test_a_bad_link_is_named_as_a_pair(link, finding):
    assert wrong(measured(p02=link)) == [finding]


def test_a_slow_node_is_named_as_a_node():
    slow = {f"p{a}{b}": pair(a, b, gbit=(1, 1)) for a, b in ((0, 1), (1, 2), (1, 3))}
    assert wrong(measured(**slow)) == [("fail", "bandwidth", (1,))]


def test_slow_ethernet_fails_only_where_gpus_would_wait_for_it():
    assert wrong(measured(**all_pairs(1))) == [("fail", "bandwidth", ())]
    assert wrong(measured(**all_pairs(1)), gpus=False) == []
    assert wrong(measured(**all_pairs(9.0))) == [], "10 Gb/s with what TCP leaves of it"


def test_every_finding_that_is_no_pass_has_a_target_and_a_remedy():
    found = measured(p02=pair(0, 2, 30.0, (0.01, 0.0), False, (1, 1)))
    found.hellos[1]["chosen"] = {"NCCL_SOCKET_IFNAME": ["eth0", "172.17.0.2"]}
    found.hellos[2] |= {"taken": [6383], "resolves": [], "mtu": {"eth1": 1200}}
    found.reached[3] = [(1, "10.0.0.1", 6384, "connection refused")]
    found.offsets_s[2] = 90.0
    bad = [f for f in judge_network(found, True) if f.level != "pass"]
    assert {f.check for f in bad} >= {"interface", "ports", "MTU", "loss", "bandwidth", "clock", "round trip"}
    assert all(f.target and f.remedy for f in bad)


def test_blocks_are_named_by_direction():
    found = measured()
    found.reached[1] = [(3, "10.0.0.3", port, "no answer") for port in (6381, 6383, 6384)]
    assert wrong(found) == [("fail", "ports", (1, 3))]
    assert "though node 3 reaches it" in failures(found)[0].figure
    found.reached[3] = [(1, "10.0.0.1", port, "no answer") for port in (6381, 6383, 6384)]
    (finding,) = failures(found)
    assert finding.figure == "no connection either way" and finding.nodes == (1, 3) and finding.machine
    found.reached[3] = []
    found.reached[1] = [(3, "10.0.0.3", 6384, "connection refused")]
    (finding,) = failures(found)
    assert finding.figure == "port 6384 of 10.0.0.3: connection refused" and finding.nodes == (1, 3)


@pytest.mark.parametrize("ports", [(6381, 6383, 6384), (6384,), (40001, 50001)])
def test_a_rule_that_shuts_all_pairs_out_takes_no_other_machine(ports):
    found = measured()
    for source in range(4):
        found.reached[source] = []
        for to in range(4):
            blocked = [(to, f"10.0.0.{to}", port, "no answer") for port in ports]
            found.reached[source] += blocked if to != source else []
    found = failures(found)
    assert found and not any(finding.machine for finding in found)


def test_interfaces_clocks_mtu_and_names_are_judged_per_node():
    found = measured()
    found.hellos[1]["chosen"] = {"NCCL_SOCKET_IFNAME": ["eth0", "172.17.0.2"]}
    found.hellos[2]["mtu"]["eth1"] = 1200
    found.hellos[3]["resolves"] = []
    found.offsets_s[2], found.offsets_s[3] = 90.0, -10.0
    assert sorted(wrong(found)) == [
        ("fail", "clock", (2,)),
        ("fail", "interface", (1,)),
        ("warn", "MTU", (2,)),
        ("warn", "clock", (3,)),
        ("warn", "host name", (3,)),
    ]
    (figure,) = [f.figure for f in judge_network(found, True) if f.check == "interface" and f.level == "fail"]
    assert figure.startswith("NCCL_SOCKET_IFNAME names eth0 (172.17.0.2), an address that node 0 has, too")


def test_ports_of_the_systems_own_range_are_named_apart():
    """A firewall that opens the job's own ports alone: Gloo and NCCL get theirs from the range."""
    found = measured()
    for source in (0, 2, 3):
        found.reached[source] = [(1, "10.0.0.1", port, "connection refused") for port in (40001, 50001)]
    (finding,) = failures(found)
    assert (finding.check, finding.nodes) == ("ports", (1,))
    assert "ports 40001, 50001 of 10.0.0.1, such as Gloo and NCCL get" in finding.figure and finding.machine
    found.reached[2] = found.reached[3] = []
    assert wrong(found) == [("fail", "ports", (0, 1))]


def test_host_names_lead_to_their_nodes():
    found = measured()
    found.hellos[1]["resolves"] = ["127.0.1.1"]
    assert wrong(found) == []
    found.hellos[1]["resolves"] = ["10.0.0.9"]
    found.names = {2: {3: ["10.0.0.0"]}, 3: {2: ["192.168.0.2"], 1: []}}  # the last: another network's names
    assert wrong(found) == [("fail", "host name", (1,)), ("fail", "host name", (2,))]


def test_an_address_that_two_nodes_have_is_named():
    hellos = measured().hellos
    addresses = {rank: f"10.0.0.{rank}" for rank in hellos}
    assert duplicate_addresses(hellos, addresses) == []
    hellos[3]["addresses"].append("10.0.0.1")
    (finding,) = duplicate_addresses(hellos, addresses)
    assert (finding.nodes, finding.machine) == ((1, 3), False)


def test_a_variable_that_names_no_interface_fails(probers):
    given = {"NCCL_SOCKET_IFNAME": "ens9", "GLOO_SOCKET_IFNAME": "^lo,docker"}
    hello = probers[0].hello(given)
    assert len(hello["wrong"]) == 2 and "only NCCL leaves out what follows ^" in hello["wrong"][1]
    found = measured()
    found.hellos[2]["wrong"] = hello["wrong"]
    assert wrong(found) == [("fail", "interface", (2,))] * 2


def test_a_node_says_where_it_looks_for_the_head_and_takes_its_verdict(probers):
    a, b = probers
    b.head = "10.9.9.9"
    assert a.who("127.0.0.1", b.port) == (b.rank, "10.9.9.9")
    assert a.tell("127.0.0.1", b.port, 2, "two heads")
    assert b.verdict == {"code": 2, "why": "two heads"}
    astray = rendezvous.join_head("127.0.0.1", {"run": a.run_id, "rank": 7, "nodes": 9}, 5.0, b.port)
    said = astray.receive(5.0)
    assert said["kind"] == "astray" and "it is not the head" in said["why"]
    assert b.misled == {7: "127.0.0.1"}


def test_the_better_of_two_measurements_counts():
    one = Pair(0, 1, 5.0, (0.01, 0.0), False, (10.0, 1.0))
    two = Pair(0, 1, 0.2, (0.0, 0.02), True, (1.0, 20.0))
    assert better_measurement(one, two) == Pair(0, 1, 0.2, (0.0, 0.0), True, (10.0, 20.0))


# --- real sockets ---------------------------------------------------------------------------------------


@pytest.fixture
def probers(free_port):
    made = [Prober(rank, "run", 0, [free_port] if rank else []) for rank in (0, 1)]
    yield made
    for prober in made:
        prober.close()


def ask(probers):
    def asked(orders):
        answers: dict = {}

        def work(rank, order):
            answers[rank] = probers[rank].carry_out_order(order) | {"offset_s": 0.0}

        threads = [threading.Thread(target=work, args=item) for item in orders.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    return asked


def test_two_nodes_survey_each_other(probers, monkeypatch):
    monkeypatch.setattr(network, "PAIR_SECONDS", 0.4)
    hellos = {p.rank: p.hello({}) for p in probers}
    found = network.survey_network(hellos, {0: "127.0.0.1", 1: "127.0.0.1"}, ask(probers))
    (link,) = found.pairs
    assert found.reached == {0: [], 1: []} and found.routes == {0: {1: "127.0.0.1"}, 1: {0: "127.0.0.1"}}
    assert link.udp and link.carries and link.loss == (0.0, 0.0) and 0 < link.round_trip_ms < 50
    assert min(link.bytes_per_s) > 1e7


def test_a_port_that_leads_to_another_program_or_nowhere_is_wrong(probers, free_port):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up():
            connection, _ = other.accept()
            connection.recv(100)
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        strange = other.getsockname()[1]
        ports = [probers[1].port, free_port, strange, 1, probers[0].port]
        order = {"stage": "ports", "peers": {1: ["127.0.0.1", ports]}}
        wrong = probers[0].carry_out_order(order)["reached"]
    last = [(probers[0].port, "node 0 answers there"), (strange, "another program answers there")]
    assert wrong == [(1, "127.0.0.1", *port) for port in ((1, "connection refused"), *sorted(last))]


class Echo:
    """An echo before which something else happens: `before` gives whether a datagram goes back."""

    def __init__(self, echo, before):
        self.echo, self.before = echo, before

    def __getattr__(self, name):
        return getattr(self.echo, name)

    def sendto(self, data, to):
        if self.before(data):
            self.echo.sendto(data, to)


def losses(probers, monkeypatch, before) -> tuple[float, float]:
    """The share of datagrams lost there and back, of 500."""
    monkeypatch.setattr(probe, "DATAGRAMS", 500)
    probers[1]._udp = Echo(probers[1]._udp, before)
    time.sleep(0.6)
    order = {"stage": "datagrams", "address": "127.0.0.1", "port": probers[1].port, "mtu": 1500}
    answer = probers[0].carry_out_order(order | {"udp": probers[1].udp_port})
    return answer["loss_out"], answer["loss_back"]


def test_losses_are_counted_by_direction(probers, monkeypatch):
    """An echo that drops every fiftieth datagram on its way back."""
    count = 0

    def drops(data) -> bool:
        nonlocal count
        count += len(data) == probe.DATAGRAM_BYTES
        return len(data) != probe.DATAGRAM_BYTES or bool(count % 50)

    assert losses(probers, monkeypatch, drops) == (0.0, pytest.approx(0.02))


@pytest.mark.slow
def test_an_echo_that_stalls_is_late_and_loses_nothing(probers, monkeypatch):
    """Its process gets no processor, again and again for 0.2 s, then for longer than LATE_S."""
    stalls = iter([0.2] * 8 + [2.5])
    count = 0

    def stands_still(data) -> bool:
        nonlocal count
        count += 1
        if count > probe.PINGS and not count % 47:
            time.sleep(next(stalls, 0))
        return True

    assert losses(probers, monkeypatch, stands_still) == (0, 0)


def test_a_prober_frees_its_ports(free_port):
    prober = Prober(0, "run", free_port, [])
    assert prober.port == free_port
    order = {"stage": "ports", "peers": {0: ["127.0.0.1", [free_port]]}}
    assert prober.carry_out_order(order)["reached"] == []
    prober.close()
    again = Prober(0, "run", free_port, [])
    assert again.port == free_port and again.taken == []
    again.close()
