"""The launcher of every node but the head: joins, adds its GPUs to Ray, and exits with the head's exit
code."""

from __future__ import annotations

import os
import signal
import time

from trainer.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_RAY
from trainer.node import topology
from trainer.node.launch import rendezvous
from trainer.node.launch.launcher import POLL_S, STOPPED, Ended, Launcher
from trainer.node.launch.ray_node import Ports
from trainer.node.watch import preemption as preempt
from trainer.node.watch import watchdog
from trainer.observe.node_monitor import NodeMonitor


class WorkerLauncher(Launcher):
    """Any other node: joins, adds its GPUs to Ray, and exits with the head's exit code."""

    link: rendezvous.Link | None = None
    cloud: preempt.Notice | None = None

    def run(self) -> int:
        """The whole launch. Raises Ended."""
        looked = self.look_at_host()  # first: a node that listens and does not join counts as blocked
        self.prober = self.make_prober(self.port)
        hello: rendezvous.Message = {
            "rank": self.node.rank,
            "nodes": self.node.nodes,
            "run": self.config.run_id,
            "start": topology.start_names(os.environ),
            "host": os.uname().nodename,
            "network": self.prober.hello(),
        }
        hello |= looked
        if self.prober.is_me(self.node.head, self.port):
            others = ", ".join(f"{i.name} {i.address}" for i in topology.interfaces())
            raise Ended(
                EXIT_CONFIG,
                f"the head's address {self.node.head} is this node's own: it is not on the network that the nodes "
                f"share; give another in SPOTRL_HEAD or SPOTRL_PEERS (this node has {others})",
            )
        self.link = rendezvous.join(
            self.node.head, hello, self.wait_s, self.port, stop=lambda: self.signals.number is not None
        )
        self.say(f"joined the head {self.node.head} ({self.link.peer_address})")
        while (order := self.hear(self.wait_s, "start", "allreduce", "probe"))["kind"] == "probe":
            self.link.send({"kind": "probed", **self.prober.obey(order)})
        self.prober.close()
        if order["kind"] == "allreduce":
            code = self.measure_speed(order["head"], order["port"], lambda: self.hear(0))
            if not code:
                # Waits for the head's exit code: a node that exits first counts as lost.
                self.hear(self.wait_s, "verdict")
            return code
        ray = self.make_ray(self.link.local_address, Ports.choose(alone=False), order["token"])
        ray.start_worker(order["ray"])
        for _ in self.until(lambda: f"Ray did not start on this node ({ray.complaint()})", EXIT_RAY):
            self.hear(0)
            if ray.ready():
                break
        self.link.send({"kind": "ready"})
        told = False
        # This machine's metadata server: the head polls only its own.
        cloud = self.cloud = preempt.Notice(signals=False)
        monitor = NodeMonitor(self.node.rank, self.config.run.dir, self.beacons(ray))
        while True:
            self.hear(POLL_S)
            if sample := monitor.due():
                self.link.send({"kind": "sample", "sample": sample})
            if not ray.alive():
                raise Ended(EXIT_NODE_LOST, f"Ray ended on this node: {ray.complaint()}", died=not told)
            if (self.signals.number is not None or cloud.reason) and not told:
                told = True
                reason = "interrupted" if self.signals.number == signal.SIGINT else cloud.reason or "SIGTERM"
                self.announce(reason)
                self.link.send({"kind": "notice", "reason": reason})
            if self.signals.expired:
                raise Ended(self.signals.code, "the time after the notice is over")

    def hear(self, timeout_s: float, *wanted: str) -> rendezvous.Message:
        """The next message of a wanted kind, or {} after `timeout_s` if none is wanted. Raises Ended at the
        end."""
        assert self.link is not None
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.link.receive(min(POLL_S, timeout_s)) or {}
            match message.get("kind"):
                case "end":
                    raise Ended(message["code"], "")
                case "refused":
                    raise Ended(message["code"], message["why"])
                case "notice":
                    self.announce(message["reason"])
                case "dump" if self.ray is not None:
                    ranks = watchdog.dump(self.beacons(self.ray), self.node.rank)
                    self.link.send({"kind": "dumped", "ranks": ranks})
                case kind if kind in wanted:
                    return message
            if not message and (why := self.link.lost()):
                raise Ended(EXIT_NODE_LOST, f"the head {self.node.head} is lost: it {why}")
            if wanted and self.signals.number is not None:
                raise Ended(self.signals.code, STOPPED)
            if time.monotonic() >= deadline:
                if wanted:
                    raise Ended(
                        EXIT_NODE_LOST, f"the head {self.node.head} sent nothing within {timeout_s:.0f} s"
                    )
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
