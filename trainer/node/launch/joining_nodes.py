"""The head of several nodes until all have connected and have been measured and compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from trainer.node.launch import rendezvous
from trainer.node.launch.launcher import STOPPED, Launcher
from trainer.node.launch.rendezvous import LaunchEnded
from trainer.node.preflight import (
    findings,
    gpus,
    infiniband,
    network,
    network_checks,
    refused,
    same_setup,
)
from trainer.node.preflight.findings import Finding
from trainer.node.preflight.probe import addresses_of
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_PREFLIGHT

PROBE_S = 60.0
"""Longest wait for one probe of a pair."""
ACCEPT_S = 0.5
"""Longest wait for a node to connect, between two looks at signals and deadlines."""
MOST_ASKED = 8
"""Missing nodes that one diagnosis asks who they are."""
ALIKE = "give all nodes the same SPOTRL_HEAD and SPOTRL_PEERS"
DIAGNOSE_S = 15.0
"""Seconds between two diagnoses of missing nodes."""


class JoiningHead(Launcher):
    """A head with the other nodes of its launch, and what the checks of all of them found."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.others = rendezvous.RendezvousHead(1, self.config.run_id)
        self.holder: AttemptHolder | None = None
        self.findings: list[Finding] = []
        self.machines: dict[int, refused.Machine] = {}
        self.measured: dict[str, Any] = {}
        """What was measured between the nodes, for the file of findings."""
        self.fabric_gbit_per_s = 0.0
        """Speed of this node's InfiniBand or RoCE; 0 without any."""

    def check_others(self) -> list[tuple[int, rendezvous.Message]]:
        """The other nodes' messages. Raises LaunchEnded if one is lost or failed, or Ray has died here."""
        messages = self.others.messages()
        self.check_own_workers()
        if self.ray is not None and not self.ray.alive():
            raise LaunchEnded(EXIT_NODE_LOST, f"Ray ended on the head: {self.ray.complaint()}", died=True)
        return messages

    def wait_for_all(self) -> None:
        """Waits for all nodes. Raises LaunchEnded naming the missing ones and what is known of them."""
        self.say(f"waiting for {self.node.nodes - 1} more nodes ({self.node.platform}) on port {self.port}")
        deadline = time.monotonic() + self.wait_s
        diagnosed = time.monotonic()
        blocked = 0, ""
        while missing := self.others.missing():
            names = self.others.names(missing)
            if self.signals.number is not None:
                raise LaunchEnded(self.signals.code, STOPPED)
            if time.monotonic() > deadline:
                why = f"{names} did not connect within {self.wait_s:.0f} s: is it up?"
                raise LaunchEnded(EXIT_NODE_LOST, why)
            if time.monotonic() - diagnosed > min(DIAGNOSE_S, self.wait_s / 3):
                code, why = self._what_blocks(missing)
                if why and (code, why) == blocked:  # twice the same: the node is not just starting
                    raise LaunchEnded(code, why)
                blocked = code, why
                self.say(why or f"still waiting for {names}")
                diagnosed = time.monotonic()
            rank = self.others.accept(ACCEPT_S)
            if rank is not None:
                where = f"{self.others.hellos[rank]['host']} {self.others.links[rank].peer_address}"
                self.say(f"node {rank} connected: {where}")
        for rank, why in self.others.lost().items():
            raise LaunchEnded(EXIT_NODE_LOST, f"{self.node.name_of(rank)} {why}")

    def _what_blocks(self, missing: Iterable[int]) -> tuple[int, str]:
        """(exit code, what keeps a missing node from the head, in a line); (0, "") where nothing is known."""
        port = self.port
        peers = {rank: (self.node.peers[rank], [port]) for rank in missing if rank < len(self.node.peers)}
        here = [0, *self.others.links]
        answers = self.ask({rank: {"stage": "ports", "peers": peers} for rank in here})
        for rank, answer in answers.items():
            for lost, address in answer["misled"].items():
                why = f"{self.others.names([int(lost)])} takes {address}, which is node {rank}, for the head"
                return EXIT_CONFIG, f"{why}: {ALIKE}"
        for lost, (address, _) in list(peers.items())[:MOST_ASKED]:
            if why := self._who_is_there(lost, address):
                return EXIT_CONFIG, why
        for lost in peers:
            reach = []
            for rank in here:
                if rank in answers and all(where[0] != lost for where in answers[rank]["reached"]):
                    reach.append(rank)
            name = self.others.names([lost])
            if 0 in reach:
                why = f"{name} -> node 0: it is up and cannot connect to the head's port {port}"
                if self.others.links:  # others can: it is this machine's firewall
                    return EXIT_PREFLIGHT, why
                return EXIT_CONFIG, f"{why}, as no node can: open all TCP between the nodes"
            if reach:
                by = self.others.names(reach)
                return EXIT_PREFLIGHT, f"node 0 -> {name}: it answers {by}, but not the head: blocked"
        return 0, ""

    def _who_is_there(self, rank: int, address: str) -> str:
        """What is wrong with the node at a missing node's address, or with where it looks for the head."""
        assert self.prober is not None
        try:
            other, sought = self.prober.who(address, self.port)
        except (OSError, ValueError):
            return ""
        name = self.others.names([rank])
        if other == 0:
            return f"{name} takes itself for the head: two nodes have SPOTRL_NODE_RANK 0"
        if other != rank:
            return f"node {other} answers at the address of {name}: two nodes have one address, or one rank"
        linked = {link.local_address for link in self.others.links.values()}
        ours = {self.node.head, *addresses_of(self.node.head), *linked}
        if sought and sought not in ours and not ours & set(addresses_of(sought)):
            return f"{name} looks for the head at {sought}, and it is at {self.node.head}: {ALIKE}"
        return ""

    def compare(self, own: rendezvous.Message) -> None:
        """Collects what the other nodes found and what differs between nodes, and measures the network.

        own: what the head found of itself.
        """
        assert self.prober is not None
        fabrics = {0: own["infiniband"]}
        networks = {0: self.prober.hello()}
        for rank, hello in sorted(self.others.hellos.items()):
            self.findings += map(findings.finding_from_message, hello["findings"])
            self.machines[rank] = refused.machine_from_message(hello["machine"])
            self.findings += same_setup.compare_facts(own["facts"], hello["facts"], rank)
            fabrics[rank] = hello["infiniband"]
            networks[rank] = hello["network"]
        self.findings += gpus.compare_gpus(self.findings)
        self.findings += infiniband.judge_infiniband(fabrics)

        addresses = self.others.addresses
        if same := network_checks.duplicate_addresses(networks, addresses):
            self.findings += same  # nothing that is measured would be true
            return
        self.say("measuring the network between all nodes")
        survey = network.survey_network(networks, addresses, self.ask)
        self.fabric_gbit_per_s = infiniband.used_gbit_per_s(self.env)
        # With InfiniBand or RoCE, NCCL leaves TCP to the rendezvous.
        by_tcp = self.config.placement.device == "cuda" and not self.fabric_gbit_per_s
        self.findings += network_checks.judge_network(survey, gpus=by_tcp)
        pairs = [asdict(pair) for pair in survey.pairs]
        self.measured = {"pairs": pairs, "nodes": networks, "addresses": addresses}

    def ask(self, orders: network.Orders) -> dict[int, rendezvous.Message]:
        """Sends each node one order, this one's in a thread; returns the replies. Raises LaunchEnded."""
        began = time.time()
        answers: dict[int, rendezvous.Message] = {}
        for rank in orders.keys() - {0}:
            self.others.links[rank].send({"kind": "probe", **orders[rank]})

        def obey() -> None:
            assert self.prober is not None
            answers[0] = self.prober.carry_out_order(orders[0])

        def late() -> str:
            return f"{self.others.names(orders.keys() - answers.keys())} did not finish the network checks"

        if 0 in orders:
            threading.Thread(target=obey, daemon=True).start()
        for _ in self.until(late, EXIT_NODE_LOST, PROBE_S):
            for rank, message in self.others.messages():
                if message["kind"] == "probed":
                    answers[rank] = message
            if orders.keys() <= answers.keys():
                break
        middle = (began + time.time()) / 2
        for answer in answers.values():
            answer["offset_s"] = answer["time"] - middle if "time" in answer else 0.0
        return answers
