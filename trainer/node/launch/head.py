"""The head's launcher: waits for the other nodes, runs Ray's head and the job, and sends every node the exit
code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config.run_folder import read_progress
from trainer.exit_codes import (
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_RAY,
    FINAL_EXIT_CODES,
    RECOVER_EXIT_CODES,
)
from trainer.node import topology
from trainer.node.launch import dashboard, rendezvous
from trainer.node.launch.job_log import JobLog
from trainer.node.launch.launcher import MASTER_PORT, POLL_S, SPEED_FILE, STOPPED, Ended, Launcher
from trainer.node.launch.ray_node import End, Job, Ports, RayEnded, RayNode
from trainer.node.preflight import findings, gpus, host, infiniband, machine, network, speed
from trainer.node.preflight.findings import Finding
from trainer.node.watch import attempt_holder, watchdog
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.observe.node_monitor import NodeMonitor, append

PROBE_S = 60.0
"""Longest wait for one probe of a pair."""
RANKS_GONE_S = rendezvous.SILENCE_S + 1.0
"""From a job's end until its ranks are gone, their GPUs' memory is free, and a silent node counts as lost."""
DIAGNOSE_S = 15.0
"""Seconds between two diagnoses of missing nodes."""


class HeadLauncher(Launcher):
    """Node 0: gathers the others, runs Ray's head and the job, and tells everyone how it ended."""

    links: rendezvous.Head | None = None
    holder: AttemptHolder | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: list[Finding] = []
        self.machines: dict[int, machine.Machine] = {}
        self.measured: dict[str, Any] = {}
        self.fabric, self.told = 0.0, 0
        self.noticed = False
        """Whether a machine of this launch is about to be taken away."""
        self.said = ""
        """What the job said about its end."""

    def run(self) -> int:
        """The whole launch. Raises Ended."""
        if self.node.nodes > 1:
            start = topology.start_names(os.environ)
            self.links = rendezvous.Head(self.node.nodes, self.config.run_id, self.port, start=start)
        own = self.look_at_host()
        self.found = [findings.received(f) for f in own["findings"]]
        self.machines = {0: machine.received(own["machine"])}
        if self.links:
            self.prober = self.make_prober(0)
            self.gather()
            self.compare_nodes(own)
            self.prober.close()
        self.refuse()
        if self.arguments.preflight:
            return self.preflight()
        restarted = self.node.engine != "local"
        self.holder = AttemptHolder(self.config, counts=restarted, trains=not self.arguments.command)
        self.env |= self.holder.take()
        self.start_ray()
        if self.links:
            self.gate()
        code = self.watch(self.submit({}))
        while code == EXIT_NODE_LOST and restarted and self.machines_stay():
            attempt = self.holder.start_again_here(self.said, self.step())
            if not attempt:
                self.died = True
                break
            self.say("a rank's process died and no machine did: the job starts again on them")
            self.began_unix_s = time.time()
            code = self.watch(self.submit(attempt))
        return code

    def machines_stay(self) -> bool:
        """Waits until the ranks of a job that ended are gone; returns whether all machines can be used on.

        Raises Ended if a node is lost: it may be what ended the job, and a silent one is not noticed at once.
        """
        deadline = time.monotonic() + RANKS_GONE_S
        while time.monotonic() < deadline:
            self.check_others()
            if self.noticed or self.signals.number is not None:
                return False
            time.sleep(POLL_S)
        return True

    def step(self) -> int:
        """The step that the job has reached in this attempt; 0 before the first."""
        progress = read_progress(self.config.run.dir)
        return progress["step"] if progress.get("started_unix_s", 0.0) >= self.began_unix_s else 0

    def gather(self) -> None:
        """Waits for all nodes. Raises Ended naming the missing ones, and what is known of them."""
        assert self.links is not None
        self.say(f"waiting for {self.node.nodes - 1} more nodes ({self.node.engine}) on port {self.port}")
        deadline, told, blocked = time.monotonic() + self.wait_s, time.monotonic(), ""
        while missing := self.links.missing():
            names = self.names(missing)
            if self.signals.number is not None:
                raise Ended(self.signals.code, STOPPED)
            if time.monotonic() > deadline:
                raise Ended(EXIT_NODE_LOST, f"{names} did not connect within {self.wait_s:.0f} s: is it up?")
            if time.monotonic() - told > min(DIAGNOSE_S, self.wait_s / 3):
                why = self.blocked(missing)
                if why and why == blocked:
                    raise Ended(EXIT_PREFLIGHT, why)
                blocked = why
                self.say(why or f"still waiting for {names}")
                told = time.monotonic()
            if (rank := self.links.accept(0.5)) is not None:
                self.say(
                    f"node {rank} connected: {self.links.hellos[rank]['host']} {self.links.links[rank].peer_address}"
                )
        for rank, why in self.links.lost().items():
            raise Ended(EXIT_NODE_LOST, f"{self.node.name_of(rank)} {why}")

    def blocked(self, missing: list[int]) -> str:
        """What blocks a missing node that is up: which nodes reach it. "" if none does."""
        assert self.links is not None
        peers = {
            rank: (self.node.peers[rank], [self.port]) for rank in missing if rank < len(self.node.peers)
        }
        here = [0, *self.links.links]
        answers = self.ask({rank: {"stage": "ports", "peers": peers} for rank in here}) if peers else {}
        for lost in peers:
            reach = [r for r in here if r in answers and all(w[0] != lost for w in answers[r]["reached"])]
            if 0 in reach:
                return f"{self.names([lost])} -> node 0: it is up and cannot connect to the head's port {self.port}"
            if reach:
                return f"node 0 -> {self.names([lost])}: it answers {self.names(reach)}, but not the head: blocked"
        return ""

    def compare_nodes(self, own: rendezvous.Message) -> None:
        """Adds what the other nodes found, what differs between nodes, and the measurements of the
        network."""
        assert self.links is not None and self.prober is not None
        hellos = self.links.hellos
        for rank, hello in sorted(hellos.items()):
            self.found += map(findings.received, hello["findings"])
            self.machines[rank] = machine.received(hello["machine"])
            self.found += host.compare(own["facts"], hello["facts"], rank)
        fabrics = {0: own["infiniband"]} | {r: h["infiniband"] for r, h in hellos.items()}
        self.found += gpus.compare(self.found) + infiniband.judge(fabrics)
        addresses = {0: self.address} | {r: link.peer_address for r, link in self.links.links.items()}
        networks = {0: self.prober.hello()} | {r: h["network"] for r, h in hellos.items()}
        self.say("measuring the network between all nodes")
        survey = network.survey({r: networks[r] for r in sorted(networks)}, addresses, self.ask)
        self.fabric = sum(p.gbit_per_s for p in infiniband.fastest(infiniband.ports()))
        # With InfiniBand or RoCE, NCCL leaves TCP to the rendezvous.
        self.found += network.judge(survey, gpus=self.config.placement.device == "cuda" and not self.fabric)
        self.measured = {
            "pairs": [asdict(p) for p in survey.pairs],
            "nodes": networks,
            "addresses": addresses,
        }

    def ask(self, orders: network.Orders) -> dict[int, rendezvous.Message]:
        """Sends each node one order (this node's runs in a thread) and returns the replies. Raises Ended."""
        assert self.links is not None and self.prober is not None
        began, answers, prober = time.time(), {}, self.prober
        for rank in orders.keys() - {0}:
            self.links.links[rank].send({"kind": "probe", **orders[rank]})
        if 0 in orders:
            work = threading.Thread(
                target=lambda: answers.__setitem__(0, prober.obey(orders[0])), daemon=True
            )
            work.start()
        late = lambda: f"{self.names(orders.keys() - answers.keys())} did not finish the network checks"  # noqa: E731
        for _ in self.until(late, EXIT_PREFLIGHT, PROBE_S):
            answers.update(
                (rank, message) for rank, message in self.check_others() if message["kind"] == "probed"
            )
            if orders.keys() <= answers.keys():
                break
        middle = (began + time.time()) / 2
        return {r: a | {"offset_s": a["time"] - middle if "time" in a else 0.0} for r, a in answers.items()}

    def refuse(self, last: bool = False) -> None:
        """Shows and writes what was found. Raises Ended if any check failed."""
        name_of = self.node.name_of if self.node.nodes > 1 else lambda rank: ""
        for line in findings.lines(self.found[self.told :], name_of):
            print(line, file=sys.stderr, flush=True)
        self.told = len(self.found)
        path, code = (
            findings.write(self.found, self.measured, self.config.run.dir),
            findings.exit_code(self.found),
        )
        if self.arguments.preflight and (last or code):
            print(findings.table(self.found, name_of), flush=True)
            self.say(f"all findings: {path}")
        elif self.node.nodes > 1 and not code:
            self.say(f"{sum(f.level == 'pass' for f in self.found)} checks passed ({path})")
        if code:
            raise Ended(code, "")

    @property
    def address(self) -> str:
        """This node's address, as the other nodes reached it. Raises Ended if they disagree."""
        if self.links is None:
            return "127.0.0.1"
        reached = {link.local_address for link in self.links.links.values()}
        if len(reached) > 1:
            raise Ended(
                EXIT_PREFLIGHT,
                f"the nodes reach the head at different addresses ({', '.join(sorted(reached))}): "
                "give all of them the one on the network that they share in SPOTRL_HEAD",
            )
        return reached.pop()

    def start_ray(self) -> None:
        """Starts Ray's head, then waits for every worker."""
        self.say("starting Ray")
        for attempts_left in (2, 1, 0):
            ports = Ports.choose(alone=self.links is None)
            ray = self.make_ray(self.address, ports)
            ray.start_head(os.environ.get("SPOTRL_DASHBOARD_HOST", self.address))
            if self.head_is_up(ray, again=self.links is None and attempts_left > 0):
                break
        self.say(dashboard.publish(self.config.run_id, ray.dashboard, ray.env["RAY_AUTH_TOKEN_PATH"]))
        if self.links is None:
            return
        self.links.send({"kind": "start", "ray": f"{self.address}:{ports.gcs}", "token": ray.token})
        waiting = set(self.links.links)
        for _ in self.until(lambda: f"{self.names(waiting)} did not join Ray"):
            waiting.difference_update(r for r, message in self.check_others() if message["kind"] == "ready")
            if not waiting:
                return

    def head_is_up(self, ray: RayNode, again: bool) -> bool:
        """Waits for Ray's head. If it exits instead: raises RayEnded, or cleans up if `again`.

        Between the choice of a port and its use, another run that starts on this machine may take it.
        """
        for _ in self.until(lambda: f"Ray's head did not start ({ray.complaint()})", EXIT_RAY):
            try:
                if ray.ready():
                    return True
            except RayEnded:
                if not again:
                    raise
                self.say("Ray did not start: trying again, on other ports if one was taken meanwhile")
                ray.close(keep_logs=False)
                return False
        raise AssertionError("`until` ends by raising")

    def names(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.node.name_of(rank) for rank in sorted(ranks))

    def check_others(self) -> list[tuple[int, rendezvous.Message]]:
        """Messages of the other nodes. Raises Ended if one is lost or has failed, or Ray has died here."""
        messages = self.links.receive() if self.links else []
        for rank, message in messages:
            if message["kind"] == "failed":
                why = f"{self.node.name_of(rank)}: {message['why']}"
                raise Ended(message["code"], why, died=message["died"])
            self.noticed = self.noticed or message["kind"] == "notice"
        for rank, why in (self.links.lost() if self.links else {}).items():
            raise Ended(EXIT_NODE_LOST, f"{self.node.name_of(rank)} is lost: it {why}")
        if self.ray is not None and not self.ray.alive():
            raise Ended(EXIT_NODE_LOST, f"Ray ended on the head: {self.ray.complaint()}", died=True)
        return messages

    def preflight(self) -> int:
        """The speed of GPUs and collectives, in place of Ray and a job."""
        code = EXIT_OK
        if self.arguments.seconds > 0:
            out = Path(self.config.run.dir) / SPEED_FILE
            out.unlink(missing_ok=True)
            if self.links:
                self.links.send({"kind": "allreduce", "head": self.address, "port": MASTER_PORT})
            code = self.measure_speed(self.address, MASTER_PORT, self.check_others)
            if out.exists():
                ranks = json.loads(out.read_text())
                self.found += speed.judge(ranks, self.fabric)
                self.measured["speed"] = ranks
                out.unlink()
        self.refuse(last=True)
        self.say("preflight failed" if code else "preflight passed")
        return code

    def gate(self) -> None:
        """A real transfer between all nodes: Ray on the wrong network shows all nodes alive and then
        hangs."""
        assert self.ray is not None and self.links is not None
        addresses = [self.address, *(link.peer_address for _, link in sorted(self.links.links.items()))]
        env = self.ray.env | {"RAY_ADDRESS": f"{self.address}:{self.ray.ports.gcs}"}
        with self.child(
            [sys.executable, "-m", "trainer.node.launch.transfer_check", *addresses], env
        ) as process:
            for _ in self.until(lambda: "the nodes did not exchange data through Ray", EXIT_PREFLIGHT):
                self.check_others()
                if process.poll() is not None:
                    break
        if process.returncode == EXIT_RAY:
            raise Ended(EXIT_RAY, "the check of the transfer could not join Ray (see the lines above)")
        if process.returncode:
            raise Ended(EXIT_PREFLIGHT, "the nodes could not exchange data through Ray (see the lines above)")

    def watch(self, job: Job) -> int:
        """Streams the job's log until it ends, whatever ends it; returns the exit code."""
        assert self.ray is not None
        log = JobLog(job.log, Path(self.config.run.dir), show=not sys.stdout.isatty())
        display = None if log.show else _display(self.config.run.dir, over := threading.Event())
        told, dog = False, watchdog.Watchdog(self.config, self.ray.debug_command())
        monitor = NodeMonitor(0, self.config.run.dir, self.beacons(self.ray))
        try:
            while True:
                log.pump()
                if why := dog.overdue():
                    self.hung(why)
                samples = [sample] if (sample := monitor.due()) else []
                for rank, message in self.check_others():
                    if message["kind"] == "notice":
                        self.pass_on(f"node {rank}: {message['reason']}", job, signal.SIGTERM)
                    elif message["kind"] == "sample":
                        samples.append(message["sample"])
                for sample in samples:
                    append(self.config.run.dir, sample)
                    for line in dog.look(sample):
                        self.say(line)
                if self.signals.number is not None and not told:
                    told = True
                    if self.holder:
                        self.holder.lock.ending()
                    interrupted = self.signals.number == signal.SIGINT
                    self.say("stopping after the current phase; press Ctrl-C again to end at once" if interrupted else
                             "preemption notice: saving what can be saved")  # fmt: skip
                    self.pass_on("interrupted" if interrupted else "SIGTERM", job, self.signals.number)
                if self.signals.expired:
                    raise Ended(self.signals.code, "the time after the notice is over")
                if self.holder and self.holder.fenced:
                    job.signal(signal.SIGKILL)
                    raise Ended(EXIT_FENCED, self.holder.fenced)
                with contextlib.suppress(OSError):
                    if (end := job.ended()) is not None:
                        log.close()
                        return self.verdict(end, log)
                time.sleep(POLL_S)
        finally:
            if display is not None:
                over.set()
                display.join(5.0)

    def hung(self, why: str) -> None:
        """Writes all ranks' stacks, names the rank at fault. Raises Ended unless told to warn, or a rank
        waits."""
        assert self.ray is not None
        if self.links:
            self.links.send({"kind": "dump"})
        ranks = [watchdog.Rank(**r) for r in watchdog.dump(self.beacons(self.ray), 0)]
        waiting, deadline = set(self.links.links if self.links else ()), time.monotonic() + watchdog.DUMPED_S
        while waiting and time.monotonic() < deadline:
            for rank, message in self.check_others():
                if message["kind"] == "dumped":
                    waiting.discard(rank)
                    ranks += [watchdog.Rank(**r) for r in message["ranks"]]
            time.sleep(POLL_S)
        text = watchdog.told(self.beacons(self.ray), ranks, why, self.config.run.dir)
        if self.config.watch.on_hang == "end" and not any(r.paused for r in ranks):
            raise Ended(EXIT_NODE_LOST, text, died=True)
        self.say(f"warning: {text}")

    def pass_on(self, reason: str, job: Job, number: int) -> None:
        """A preemption notice on one node applies to all."""
        if number == signal.SIGTERM:
            self.announce(reason)
            if self.links:
                self.links.send({"kind": "notice", "reason": reason})
        if not job.signal(number) and self.signals.number is not None:
            raise Ended(self.signals.code, STOPPED)

    def verdict(self, end: End, log: JobLog) -> int:
        """The exit code of the run from how its job ended."""
        if end.status == "SUCCEEDED":
            return EXIT_OK
        self.said = log.reason()
        if end.status == "STOPPED":
            raise Ended(EXIT_INTERRUPTED, "the job was stopped through Ray")
        if not log.show:
            print(log.tail(), file=sys.stderr, flush=True)
        code = end.code
        if code in (*RECOVER_EXIT_CODES, *FINAL_EXIT_CODES, EXIT_INTERRUPTED):
            return code
        quiet_since = time.monotonic()
        while self.links and self.links.quiet() and time.monotonic() - quiet_since < rendezvous.SILENCE_S:
            self.check_others()  # the job may fail because of a lost node before the heartbeat shows the loss
            time.sleep(POLL_S)
        if self.signals.number is not None:
            return self.signals.code
        if code is None:
            raise Ended(EXIT_ERROR, f"Ray ended the job: {end.message}")
        if code < 0:
            lost = -code in (signal.SIGKILL, signal.SIGTERM)  # others than these are a defect
            raise Ended(
                EXIT_NODE_LOST if lost else EXIT_ERROR,
                f"the job was killed by signal {-code}{': out of memory? See docs/failures.md' if lost else ''}",
                died=lost,
            )
        return code if code < 126 else EXIT_ERROR

    def settle(self, code: int) -> int:
        """Records how it ended; returns the exit code for every node."""
        if self.holder:
            # Ray that does not start, here and on the next machine, is as much the run's as one that dies.
            died = (self.died or code == EXIT_RAY) and not self.noticed and self.signals.number is None
            return self.holder.close(code, self.why or self.said, self.step() if died else None)
        if self.arguments.preflight or self.node.engine == "local":
            return code  # such a launch is never restarted
        return attempt_holder.count(self.config, code, self.why, self.found, self.machines)

    def finish(self, code: int) -> None:
        """Sends every node the exit code, then cleans up."""
        if self.links:
            self.links.send({"kind": "end", "code": code})
        self.close(code)
        if self.ray is not None:
            dashboard.withdraw(self.config.run_id)
        if self.holder:
            self.holder.lock.close()
        if self.links:
            self.links.close()


def _display(run_dir: str, over: threading.Event) -> threading.Thread:
    from trainer.observe.live import follow

    thread = threading.Thread(target=follow, args=(run_dir, over.is_set), daemon=True)
    thread.start()
    return thread
