"""The head's launcher: runs Ray's head and the job, and sends every node the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.config.run_folder import read_progress
from trainer.node import topology
from trainer.node.launch import ray_node, rendezvous
from trainer.node.launch.job_watch import JobWatch
from trainer.node.launch.joining_nodes import JoiningHead
from trainer.node.launch.launcher import MASTER_PORT, POLL_S, SPEED_FILE
from trainer.node.launch.ray_node import Job, Ports, RayEnded, RayNode
from trainer.node.launch.rendezvous import LaunchEnded, RendezvousHead
from trainer.node.preflight import findings, refused, speed
from trainer.node.preflight.probe import Prober
from trainer.node.watch import attempt_holder
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_OK, EXIT_PREFLIGHT, EXIT_RAY

RAY_STARTS = 3
"""Times that Ray is started on a single node, where another run may take a port meanwhile."""
RANKS_GONE_S = rendezvous.SILENCE_S + 1.0
"""From a job's end until its ranks are gone, their GPUs' memory is free, and a silent node counts as lost."""


class HeadLauncher(JoiningHead):
    """Node 0: gathers the others, runs Ray's head and the job, and tells everyone how it ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shown = 0
        """How many of the findings have been shown."""
        self.job_why = ""
        """What the job said about its end."""

    @property
    def alone(self) -> bool:
        """Whether this is the only node."""
        return self.node.nodes == 1

    def run(self) -> int:
        """The whole launch. Raises LaunchEnded."""
        self.check_place()
        if not self.alone:
            place = self.node.nodes, self.config.run_id, self.port
            start = topology.start_names(os.environ)
            self.others = RendezvousHead(*place, start=start, name_of=self.node.name_of)
        self.check_nodes()
        if self.arguments.preflight:
            return self.preflight()

        if not self.alone and not self.arguments.command:
            self.time_all_reduce()
        restarted = self.node.platform != "local"
        self.holder = AttemptHolder(self.config, counts=restarted, trains=not self.arguments.command)
        self.env |= self.holder.take()
        self.start_ray()
        if not self.alone:
            self.check_transfer()
        code = self.watch(self.submit({}))
        while code == EXIT_NODE_LOST and restarted and self.machines_stay():
            attempt = self.holder.start_again_here(self.job_why, self.step())
            if not attempt:
                self.died = True
                break
            self.say("a rank's process died and no machine did: the job starts again on them")
            self.began_unix_s = time.time()
            code = self.watch(self.submit(attempt))
        return code

    # --- before the job ---------------------------------------------------------------------------------

    def check_nodes(self) -> None:
        """Checks this machine, with others all and their network. Raises LaunchEnded if one fails."""
        own = self.look_at_host()
        self.findings = [findings.finding_from_message(finding) for finding in own["findings"]]
        self.machines = {0: refused.machine_from_message(own["machine"])}
        if not self.alone:
            self.prober = self.make_prober(0)
            self.wait_for_all()
            self.compare(own)
            self.prober.close()
        self.refuse()

    def refuse(self, last: bool = False) -> None:
        """Shows and writes what was found. Raises LaunchEnded if any check failed."""
        name_of = "".format if self.alone else self.node.name_of
        for line in findings.finding_lines(self.findings[self.shown :], name_of):
            print(line, file=sys.stderr, flush=True)
        self.shown = len(self.findings)
        code = findings.exit_code(self.findings)
        # A disk that cannot be written may be the finding.
        with contextlib.suppress(*[OSError] if code else []):
            findings.write_findings(self.findings, self.measured, self.config.run.dir)
        path = Path(self.config.run.dir) / findings.FILE
        if self.arguments.preflight and (last or code):
            print(findings.findings_table(self.findings, name_of), flush=True)
            self.say(f"all findings: {path}")
        elif not self.alone and not code:
            passed = [finding for finding in self.findings if finding.level == "pass"]
            self.say(f"{len(passed)} checks passed ({path})")
        if code:
            raise LaunchEnded(code, "")

    def preflight(self) -> int:
        """Measures the speed of GPUs and collectives, instead of starting Ray and a job."""
        if self.arguments.seconds > 0:
            self.reduce(self.arguments.seconds)
        self.refuse(last=True)
        self.say("preflight passed")
        return EXIT_OK

    def reduce(self, seconds: float) -> None:
        """Has the ranks of all nodes reduce, and takes what they measured to the findings. seconds: 0 for one
        short all-reduce. Raises LaunchEnded where it does not end."""
        out = Path(self.config.run.dir) / SPEED_FILE
        out.unlink(missing_ok=True)
        head = self.others.head_address
        self.others.send({"kind": "allreduce", "head": head, "port": MASTER_PORT, "seconds": seconds})
        failed = self.measure_speed(head, MASTER_PORT, seconds, self.check_others)
        if not out.exists():
            raise LaunchEnded(EXIT_CONFIG, failed)
        ranks = json.loads(out.read_text())
        out.unlink()
        self.findings += speed.judge_speed(ranks, self.fabric_gbit_per_s)
        self.measured["speed"] = ranks

    def time_all_reduce(self) -> None:
        """One short all-reduce before Ray starts, since NCCL on the wrong network trains for days at a
        fraction of the speed. Raises LaunchEnded where it is out of the question."""
        self.reduce(0.0)
        between = [finding for finding in self.findings if finding.check == speed.BETWEEN]
        for finding in between:
            self.say(f"all-reduce between all nodes: {finding.figure} (wanted: {finding.target})")
        self.refuse()

    def start_ray(self) -> None:
        """Starts Ray's head, then waits until every node worker has joined it."""
        self.say("starting Ray")
        address = self.others.head_address
        for start in range(1, RAY_STARTS + 1):
            ports = Ports.choose(alone=self.alone)
            ray = self.make_ray(address, ports)
            ray.start_head(os.environ.get("SPOTRL_DASHBOARD_HOST", address))
            if self.head_is_up(ray, again=self.alone and start < RAY_STARTS):
                break
        self.start_own_workers()
        self.say(
            ray_node.publish_dashboard(self.config.run_id, ray.dashboard, ray.env["RAY_AUTH_TOKEN_PATH"])
        )

        self.others.send({"kind": "start", "ray": f"{address}:{ports.gcs}", "token": ray.token})
        waiting = set(self.others.links)
        wait = self.until(lambda: f"{self.others.names(waiting)} did not join Ray")
        while waiting:
            next(wait)
            for rank, message in self.check_others():
                if message["kind"] == "ready":
                    waiting.discard(rank)

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

    def check_transfer(self) -> None:
        """Sends data between all nodes through Ray. Raises LaunchEnded where it does not arrive.

        Ray on the wrong network shows all nodes alive and then hangs.
        """
        assert self.ray is not None
        addresses = self.others.addresses
        command = [sys.executable, "-m", "trainer.node.launch.transfer_check"]
        command += [addresses[rank] for rank in sorted(addresses)]
        env = self.ray.env | {"RAY_ADDRESS": f"{addresses[0]}:{self.ray.ports.gcs}"}
        with self.child(command, env) as process:
            for _ in self.until(lambda: "the nodes did not exchange data through Ray", EXIT_RAY):
                self.check_others()
                if process.poll() is not None:
                    break
        if process.returncode == EXIT_RAY:
            raise LaunchEnded(EXIT_RAY, "the check of the transfer could not join Ray (see the lines above)")
        if process.returncode:
            code = EXIT_CONFIG if process.returncode == EXIT_CONFIG else EXIT_PREFLIGHT
            raise LaunchEnded(code, "the nodes could not exchange data through Ray (see the lines above)")

    # --- the job ----------------------------------------------------------------------------------------

    def watch(self, job: Job) -> int:
        """Watches the job until it ends; returns the exit code. Raises LaunchEnded."""
        watch = JobWatch(self, job)
        try:
            return watch.run()
        finally:
            self.job_why = watch.job_why

    def machines_stay(self) -> bool:
        """Waits until the ranks of a job that ended are gone; returns whether all machines can be used on.

        Raises LaunchEnded if a node is lost: it may be what ended the job, and a silent one is not noticed
        at once.
        """
        deadline = time.monotonic() + RANKS_GONE_S
        while time.monotonic() < deadline:
            self.check_others()
            if self.others.noticed or self.signals.number is not None:
                return False
            time.sleep(POLL_S)
        return True

    def step(self) -> int:
        """The step that the job has reached in this attempt; 0 before the first."""
        progress = read_progress(self.config.run.dir)
        return progress["step"] if progress.get("started_unix_s", 0.0) >= self.began_unix_s else 0

    # --- the end ----------------------------------------------------------------------------------------

    def settle(self, code: int) -> int:
        """Records how the launch ended; returns the exit code for every node."""
        if code and not self.arguments.preflight:
            attempt_holder.note_end(self.config.run.dir, code, self.why, self.job_why)
        if self.holder:
            # Ray that fails before the first step may have met a busy machine: that one is lost, nothing
            # died.
            died = self.died or (code == EXIT_RAY and self.step() > 0)
            preempted = self.others.noticed or self.signals.number is not None
            died_at_step = self.step() if died and not preempted else None
            return self.holder.close(code, self.why or self.job_why, died_at_step)
        if self.arguments.preflight or self.node.platform == "local":
            return code  # such a launch is never restarted
        return attempt_holder.count_failed_start(self.config, code, self.why, self.findings, self.machines)

    def finish(self, code: int) -> None:
        """Sends every node the exit code, then cleans up."""
        self.others.send({"kind": "end", "code": code})
        if code and self.prober is not None:
            self.tell_missing(self.prober, self.others.missing(), code)
        self.close(code)
        if self.ray is not None:
            ray_node.withdraw_dashboard(self.config.run_id)
        if self.holder:
            self.holder.lock.close()
        self.others.close()

    def tell_missing(self, prober: Prober, missing: list[int], code: int) -> None:
        """Gives the verdict to nodes that are up and could not join."""
        known = [self.node.peers[rank] for rank in missing if rank < len(self.node.peers)]
        with ThreadPoolExecutor(max(1, len(known))) as pool:
            list(pool.map(lambda address: prober.tell(address, self.port, code, self.why), known))
