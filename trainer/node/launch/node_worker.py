"""The launcher of a node worker, which is any node but the head."""

from __future__ import annotations

import signal
import time
from typing import NoReturn

from trainer.node.launch import rendezvous
from trainer.node.launch.launcher import POLL_S, STOPPED, LaunchEnded, Launcher
from trainer.node.launch.ray_node import Ports, RayNode
from trainer.node.watch import preemption as preempt
from trainer.node.watch import watchdog
from trainer.observe.node_monitor import NodeMonitor
from trainer.system import network
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_RAY

VERDICT_S = 15.0
"""Seconds after its own deadline that a node waits for the head's verdict, which comes at the head's."""


class NodeWorkerLauncher(Launcher):
    """A node worker: it joins the head, adds its GPUs to Ray, and exits with the head's exit code."""

    link: rendezvous.Link | None = None
    cloud: preempt.PreemptionNotice | None = None

    def run(self) -> int:
        """The whole launch. Raises LaunchEnded."""
        self.check_place()
        looked = self.look_at_host()  # first: a node that listens and does not join counts as blocked
        self.prober = self.make_prober(self.port)
        self.join(looked)
        order = self.answer_probes()
        if order["kind"] == "allreduce":
            order = self.reduce(order)
        return self.work(self.start_ray(order))

    def join(self, looked: rendezvous.Message) -> None:
        """Joins the head. looked: what was found of this machine."""
        assert self.prober is not None
        if self.prober.is_me(self.node.head, self.port):
            here = ", ".join(f"{i.name} {i.address}" for i in network.interfaces())
            why = f"the head's address {self.node.head} is this node's own: it is not on the network that the"
            why += " nodes share; give another in SPOTRL_HEAD or SPOTRL_PEERS"
            self.stay(EXIT_CONFIG, f"{why} (this node has {here})")
        hello = self.identity() | {"network": self.prober.hello()} | looked
        patience_s = self.wait_s + VERDICT_S
        try:
            self.link = rendezvous.join_head(self.node.head, hello, patience_s, self.port, stop=self.over)
        except LaunchEnded as error:
            self.stay(error.code, str(error), 0.0)
        self.say(f"joined the head {self.node.head} ({self.link.peer_address})")

    def over(self) -> bool:
        """Whether there is no more head to join: a signal, or the head's verdict."""
        assert self.prober is not None
        return self.signals.number is not None or self.prober.verdict is not None

    def stay(self, code: int, why: str, wait_s: float | None = None) -> NoReturn:
        """Waits for the verdict of a head that this node cannot join, so that all nodes leave alike. Raises
        Ended with it, else with `code`."""
        assert self.prober is not None
        deadline = time.monotonic() + (self.wait_s + VERDICT_S if wait_s is None else wait_s)
        while not self.over() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self.signals.number is not None:
            raise LaunchEnded(self.signals.code, STOPPED)
        if (verdict := self.prober.verdict) is not None:
            code = verdict["code"]
            why = f"{why}; the head: {verdict['why']}"
        raise LaunchEnded(code, why)

    def answer_probes(self) -> rendezvous.Message:
        """Takes part in the head's measurements until it orders something else; returns that order."""
        assert self.link is not None and self.prober is not None
        while True:
            order = self.hear(self.wait_s, "start", "allreduce", "probe")
            if order["kind"] != "probe":
                self.prober.close()
                return order
            self.link.send({"kind": "probed", **self.prober.carry_out_order(order)})

    def reduce(self, order: rendezvous.Message) -> rendezvous.Message:
        """This node's part of the collectives; returns the head's next order. What failed the head says, from
        its own part: a node that exits first counts as lost."""
        self.measure_speed(order["head"], order["port"], order["seconds"], lambda: self.hear(0))
        return self.hear(self.wait_s, "start")

    def start_ray(self, order: rendezvous.Message) -> RayNode:
        """Has this node join Ray on the head, and tells the head."""
        assert self.link is not None
        ray = self.make_ray(self.link.local_address, Ports.choose(alone=False), order["token"])
        ray.start_worker(order["ray"])
        for _ in self.until(lambda: f"Ray did not start on this node ({ray.complaint()})", EXIT_RAY):
            self.hear(0)
            if ray.ready():
                break
        self.start_own_workers()
        self.link.send({"kind": "ready"})
        return ray

    def work(self, ray: RayNode) -> int:
        """Sends samples and notices to the head until the launch ends, which raises Ended."""
        assert self.link is not None
        # This machine's metadata server: the head polls only its own.
        self.cloud = preempt.PreemptionNotice(signals=False)
        monitor = NodeMonitor(self.node.rank, self.config.run.dir, self.beacons(ray))
        noticed = False
        while True:
            self.hear(POLL_S)
            sample = monitor.due()
            if sample:
                self.link.send({"kind": "sample", "sample": sample})
            self.check_own_workers()
            if not ray.alive():
                why = f"Ray ended on this node: {ray.complaint()}"
                raise LaunchEnded(EXIT_NODE_LOST, why, died=not noticed)
            if not noticed and (self.signals.number is not None or self.cloud.reason):
                noticed = True
                interrupted = self.signals.number == signal.SIGINT
                reason = "interrupted" if interrupted else self.cloud.reason or "SIGTERM"
                self.announce(reason)
                self.link.send({"kind": "notice", "reason": reason})
            if self.signals.expired:
                raise LaunchEnded(self.signals.code, "the time after the notice is over")

    def hear(self, timeout_s: float, *wanted: str) -> rendezvous.Message:
        """The next message of a wanted kind, or {} after `timeout_s`. Raises LaunchEnded at the end."""
        assert self.link is not None
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.link.receive(min(POLL_S, timeout_s)) or {}
            match message.get("kind"):
                case "end":
                    raise LaunchEnded(message["code"], "")
                case "refused":
                    raise LaunchEnded(message["code"], message["why"])
                case "astray":
                    self.link.close()
                    self.link = None
                    self.stay(EXIT_CONFIG, f"SPOTRL_HEAD or SPOTRL_PEERS: {message['why']}")
                case "notice":
                    self.announce(message["reason"])
                case "dump" if self.ray is not None:
                    ranks = watchdog.dump_stacks(self.beacons(self.ray), self.node.rank)
                    self.link.send({"kind": "dumped", "ranks": ranks})
                case kind if kind in wanted:
                    return message
            if not message and self.prober is not None and (verdict := self.prober.verdict) is not None:
                raise LaunchEnded(verdict["code"], verdict["why"])
            if not message and (why := self.link.lost()):
                raise LaunchEnded(EXIT_NODE_LOST, f"the head {self.node.head} is lost: it {why}")
            if wanted and self.signals.number is not None:
                raise LaunchEnded(self.signals.code, STOPPED)
            if time.monotonic() >= deadline and wanted:
                why = f"the head {self.node.head} sent nothing within {timeout_s:.0f} s"
                raise LaunchEnded(EXIT_NODE_LOST, why)
            if time.monotonic() >= deadline:
                return {}

    def finish(self, code: int) -> None:
        """Sends the head the reason unless the head sent it, then cleans up."""
        if self.link and code:
            self.link.send({"kind": "failed", "code": code, "why": self.why, "died": self.died})
        self.close(code)
        if self.cloud:
            self.cloud.close()
        if self.link:
            self.link.close()
