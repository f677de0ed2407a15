"""The head's launcher: gathers the other nodes, runs Ray's head and the job, and tells everyone how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from trainer.exit_codes import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_PREFLIGHT,
    FINAL_EXIT_CODES,
    RECOVER_EXIT_CODES,
)
from trainer.node import preflight, rendezvous
from trainer.node.attempt_holder import AttemptHolder
from trainer.node.job_log import JobLog
from trainer.node.launcher import POLL_S, STOPPED, Ended, Launcher
from trainer.node.preflight import Failure
from trainer.node.ray_node import End, Job, Ports, RayNode

MASTER_PORT = 6389
"""Where the ranks of the preflight meet."""


class HeadLauncher(Launcher):
    """Node 0: gathers the others, runs Ray's head and the job, and tells everyone how it ended."""

    links: rendezvous.Head | None = None
    holder: AttemptHolder | None = None

    def run(self) -> int:
        """The whole launch. Raises Ended."""
        failures = {0: preflight.check(self.config, self.node)}
        if self.node.nodes > 1:
            self.links = rendezvous.Head(self.node.nodes, self.config.run_id, self.port)
            failures |= self.gather()
        self.refuse(failures)
        if self.arguments.preflight:
            return self.preflight()
        self.holder = AttemptHolder(self.config, counts=self.node.engine != "local")
        self.env |= self.holder.take()
        self.start_ray()
        assert self.ray is not None
        if self.links:
            self.gate()
        loop = "trainer.sft" if self.config.method == "sft" else "trainer.grpo"
        job_id = "".join(c if c.isalnum() or c in "-_" else "-" for c in self.config.run_id) + f"-{int(time.time())}"
        command = self.arguments.command or [sys.executable, "-m", loop, "--config", self.arguments.config]
        try:
            job = self.ray.submit(job_id, command, self.wait_s, lambda: self.signals.number is not None)
        except TimeoutError as error:
            raise Ended(EXIT_NODE_LOST, str(error)) from None
        except InterruptedError:
            raise Ended(self.signals.code, STOPPED) from None
        return self.watch(job)

    def gather(self) -> dict[int, list[Failure]]:
        """Waits for all nodes, and returns what they found wrong with themselves."""
        assert self.links is not None
        self.say(f"waiting for {self.node.nodes - 1} more nodes ({self.node.engine}) on port {self.port}")
        deadline, told = time.monotonic() + self.wait_s, time.monotonic()
        while missing := self.links.missing():
            names = self.names(missing)
            if self.signals.number is not None:
                raise Ended(self.signals.code, STOPPED)
            if time.monotonic() > deadline:
                raise Ended(EXIT_NODE_LOST, f"{names} did not come within {self.wait_s:.0f} s: is it up?")
            if time.monotonic() - told > 30.0:
                self.say(f"still waiting for {names}")
                told = time.monotonic()
            if (rank := self.links.accept(0.5)) is not None:
                self.say(
                    f"node {rank} is here: {self.links.hellos[rank]['host']} {self.links.links[rank].peer_address}"
                )
        for rank, why in self.links.lost().items():
            raise Ended(EXIT_NODE_LOST, f"{self.node.name_of(rank)} {why}")
        found = {rank: [Failure(**f) for f in hello["failures"]] for rank, hello in self.links.hellos.items()}
        ours = preflight.facts()
        for rank, hello in self.links.hellos.items():
            found[rank] += preflight.compare(ours, hello["facts"])
        return found

    def refuse(self, failures: dict[int, list[Failure]]) -> None:
        """Raises Ended if any node failed a check, with all failures of all nodes."""
        lines = [(rank, f) for rank, found in sorted(failures.items()) for f in found]
        for rank, failure in lines:
            who = f"{self.node.name_of(rank)}: " if self.node.nodes > 1 else ""
            print(f"error: {who}{failure.what}: {failure.remedy}", file=sys.stderr, flush=True)
        if lines:
            code = EXIT_PREFLIGHT if any(f.host for _, f in lines) else EXIT_CONFIG
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
        """Ray's head, then every worker."""
        self.say("starting Ray")
        for attempts_left in (2, 1, 0):
            ports = Ports.choose(alone=self.links is None)
            ray = self.make_ray(self.address, ports)
            ray.start_head(os.environ.get("SPOTRL_DASHBOARD_HOST", self.address))
            if self.head_is_up(ray, again=self.links is None and attempts_left > 0):
                break
        self.say(
            f"dashboard {ray.dashboard}  (RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={ray.env['RAY_AUTH_TOKEN_PATH']})"
        )
        if self.links is None:
            return
        self.links.send({"kind": "start", "ray": f"{self.address}:{ports.gcs}", "token": ray.token})
        waiting = set(self.links.links)
        for _ in self.until(lambda: f"{self.names(waiting)} did not join Ray"):
            waiting.difference_update(r for r, message in self.check_others() if message["kind"] == "ready")
            if not waiting:
                return

    def head_is_up(self, ray: RayNode, again: bool) -> bool:
        """Waits for Ray's head. Where it ends instead, raises RuntimeError, or clears it away if it is tried again.

        Between the choice of a port and its use, another run that starts on this machine may take it.
        """
        for _ in self.until(lambda: f"Ray's head did not start ({ray.complaint()})"):
            try:
                if ray.ready():
                    return True
            except RuntimeError:
                if not again:
                    raise
                self.say("Ray ended before it was up: again, on other ports if one was taken meanwhile")
                ray.close(keep_logs=False)
                return False
        raise AssertionError("`until` ends by raising")

    def names(self, ranks: Iterable[int]) -> str:
        """Nodes in a message."""
        return ", ".join(self.node.name_of(rank) for rank in sorted(ranks))

    def check_others(self) -> list[tuple[int, rendezvous.Message]]:
        """Messages of the other nodes. Raises Ended if one is lost or has failed, or Ray has died here."""
        messages = self.links.receive() if self.links else []
        for rank, message in messages:
            if message["kind"] == "failed":
                raise Ended(message["code"], f"{self.node.name_of(rank)}: {message['why']}")
        for rank, why in (self.links.lost() if self.links else {}).items():
            raise Ended(EXIT_NODE_LOST, f"{self.node.name_of(rank)} is lost: it {why}")
        if self.ray is not None and not self.ray.alive():
            raise Ended(EXIT_NODE_LOST, f"Ray ended on the head: {self.ray.complaint()}")
        return messages

    def preflight(self) -> int:
        """The all-reduce between all nodes, in place of Ray and a job."""
        if self.links:
            self.links.send({"kind": "allreduce", "head": self.address, "port": MASTER_PORT})
        code = self.allreduce(self.address, MASTER_PORT, self.check_others)
        self.say("preflight passed" if not code else "preflight failed")
        return code

    def gate(self) -> None:
        """A real transfer between all nodes: a Ray on the wrong network shows all nodes alive and then hangs."""
        assert self.ray is not None and self.links is not None
        addresses = [self.address, *(link.peer_address for _, link in sorted(self.links.links.items()))]
        env = self.ray.env | {"RAY_ADDRESS": f"{self.address}:{self.ray.ports.gcs}"}
        with self.child([sys.executable, "-m", "trainer.node.transfer_check", *addresses], env) as process:
            for _ in self.until(lambda: "the nodes did not exchange data through Ray", EXIT_PREFLIGHT):
                self.check_others()
                if process.poll() is not None:
                    break
        if process.returncode:
            raise Ended(EXIT_PREFLIGHT, "the nodes could not exchange data through Ray (see the lines above)")

    def watch(self, job: Job) -> int:
        """Streams the job's log until it ends, whatever ends it; returns the exit code."""
        assert self.ray is not None
        log = JobLog(job.log, Path(self.config.run.dir), show=not sys.stdout.isatty())
        display = None if log.show else _display(self.config.run.dir, over := threading.Event())
        told = False
        try:
            while True:
                log.pump()
                for rank, message in self.check_others():
                    if message["kind"] == "notice":
                        self.pass_on(f"node {rank}: {message['reason']}", job, signal.SIGTERM)
                if self.signals.number is not None and not told:
                    told = True
                    if self.holder:
                        self.holder.lock.ending()
                    interrupted = self.signals.number == signal.SIGINT
                    self.say("stopping after the phase under way; Ctrl-C again ends it at once" if interrupted else
                             "told to go away: saving what can be saved")  # fmt: skip
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

    def pass_on(self, reason: str, job: Job, number: int) -> None:
        """A notice on one node is a notice for all."""
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
        if end.status == "STOPPED":
            raise Ended(EXIT_INTERRUPTED, "the job was stopped through Ray")
        if not log.show:
            print(log.tail(), file=sys.stderr, flush=True)
        code = end.code
        if code in (*RECOVER_EXIT_CODES, *FINAL_EXIT_CODES, EXIT_INTERRUPTED):
            return code
        quiet_since = time.monotonic()
        while self.links and self.links.quiet() and time.monotonic() - quiet_since < rendezvous.SILENCE_S:
            self.check_others()  # the job may have died of a lost node before we know that it is lost
            time.sleep(POLL_S)
        if self.signals.number is not None:
            return self.signals.code
        if code is None:
            raise Ended(EXIT_ERROR, f"Ray ended the job: {end.message}")
        if code < 0:
            lost = -code in (signal.SIGKILL, signal.SIGTERM)  # by the system or the provider; others are a defect
            raise Ended(
                EXIT_NODE_LOST if lost else EXIT_ERROR,
                f"the job was killed by signal {-code}{': out of memory? See docs/failures.md' if lost else ''}",
            )
        return code if code < 126 else EXIT_ERROR

    def settle(self, code: int) -> int:
        """Records how it ended; returns the code for every node to leave with."""
        return self.holder.close(code, self.why) if self.holder else code

    def finish(self, code: int) -> None:
        """Tells every node how it ended, then cleans up."""
        if self.links:
            self.links.send({"kind": "end", "code": code})
        self.close(code)
        if self.holder:
            self.holder.lock.close()
        if self.links:
            self.links.close()


def _display(run_dir: str, over: threading.Event) -> threading.Thread:
    from trainer.observe.live import follow

    thread = threading.Thread(target=follow, args=(run_dir, over.is_set), daemon=True)
    thread.start()
    return thread
