"""What the launchers of head and node workers share: signals, waits with a deadline, Ray."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from trainer.config import RunConfig, by_model
from trainer.node import topology
from trainer.node.launch import own_workers, rendezvous
from trainer.node.launch.ray_node import ROOT, Job, Ports, RayNode, end_descendants, session_of_its_own
from trainer.node.launch.rendezvous import LaunchEnded
from trainer.node.preflight import (
    amd,
    gpus,
    host,
    infiniband,
    refused,
    same_setup,
    service_tokens,
    speed,
)
from trainer.node.preflight.probe import Prober, addresses_of
from trainer.node.topology import NodeEnvironment
from trainer.node.watch import preemption as preempt
from trainer.node.watch import watchdog
from trainer.node.watch.preemption import Signals
from trainer.observe.phases import STARTED_VARIABLE
from trainer.storage import hub
from trainer.system import network
from trainer.system.exit_codes import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RAY,
    FINAL_EXIT_CODES,
)

POLL_S = 0.2
INTERRUPT_GRACE_S = 60.0
"""Seconds after Ctrl-C for the current checkpoint. A second Ctrl-C ends everything at once."""
STOPPED = "stopped while starting"
MASTER_PORT = 6389
"""Rendezvous port of the preflight's ranks."""
SPEED_FILE = ".speed.json"


def signals_of_a_launch() -> Signals:
    """SIGTERM and Ctrl-C: the loops decide what to do with them."""
    before_the_kill_s = max(1.0, preempt.notice_s() - 1.0)
    return Signals({signal.SIGINT: INTERRUPT_GRACE_S, signal.SIGTERM: before_the_kill_s})


class Launcher(ABC):
    """One node's part of a launch. What the head and the node workers have in common."""

    def __init__(
        self, config: RunConfig, node: NodeEnvironment, arguments: argparse.Namespace, signals: Signals
    ):
        self.config, self.node = config, node
        self.arguments, self.signals = arguments, signals
        self.wait_s = config.placement.start_timeout_s
        self.port = int(os.environ.get("SPOTRL_PORT", rendezvous.PORT))
        self.env = dict(os.environ) | cache_variables(os.environ)
        self.ray: RayNode | None = None
        self.prober: Prober | None = None
        self.children = contextlib.ExitStack()
        self.fetching: subprocess.Popen[str] | None = None
        self.sampling: subprocess.Popen[str] | None = None
        """The rollout workers of this node, where the run has some on its own nodes."""
        self.why = ""
        self.died = False
        """Whether a process of the run died or hung, while its machine answered."""
        self.began_unix_s = time.time()

    def say(self, text: str) -> None:
        """One line of this node's progress."""
        print(f"[node {self.node.rank}] {text}" if self.node.nodes > 1 else text, flush=True)

    def until(
        self, missed: Callable[[], str], code: int = EXIT_NODE_LOST, deadline_s: float = 0.0
    ) -> Iterator[None]:
        """Yields while waiting. Raises LaunchEnded on a signal, and at the deadline with `what()`."""
        deadline_s = deadline_s or self.wait_s
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if self.signals.number is not None:
                raise LaunchEnded(self.signals.code, STOPPED)
            yield
            time.sleep(POLL_S)
        raise LaunchEnded(code, f"{missed()} within {deadline_s:.0f} s")

    def make_ray(self, address: str, ports: Ports, token: str = "") -> RayNode:
        """Ray for this node, with the network that `address` is on."""
        known = network.interfaces()
        interface = network.interface_of(address, known)
        self.env |= network.network_variables(interface, os.environ, known)
        placement = self.config.placement
        # Exactly the ranks' CPUs: with more, Ray would pack the ranks of two nodes onto one.
        gpus = 0 if placement.device == "cpu" else placement.workers_per_node
        cpus = placement.workers_per_node * (placement.threads_per_worker if placement.device == "cpu" else 1)
        if self.node.nodes > 1:
            self.say(f"network: {interface.name} {address}")
        ray = RayNode(address=address, ports=ports, cpus=cpus, gpus=gpus, env=self.env, token=token)
        # The launcher passes a notice to its node's ranks through this file.
        ray.env[preempt.FLAG_VARIABLE] = str(ray.temp / "notice")
        ray.env |= watchdog.watchdog_variables(self.beacons(ray))
        ray.env[hub.NODE_VARIABLE] = str(self.node.rank)  # the ranks read what is downloaded here
        self.ray = ray
        self.fetch_model()
        return ray

    def check_place(self) -> None:
        """Raises LaunchEnded where two nodes have one rank or one address. The head hears of it first."""
        node = self.node
        if node.nodes > 1 and (problem := network.ipv4_problem(node.peers)):
            raise LaunchEnded(EXIT_CONFIG, problem)
        own = [card.address for card in network.interfaces()]
        holds = topology.misplaced_rank(node, own, addresses_of) if node.nodes > 1 else None
        if holds is None:
            return
        why = (
            f"it has the address of node {holds} ({node.peers[holds]}) and takes itself for node {node.rank}:"
            " give each node its own SPOTRL_NODE_RANK and its own address"
        )
        hello = self.identity() | {"rank": holds if node.is_head else node.rank}
        raise LaunchEnded(*rendezvous.report_failure(node.peers[0], hello, EXIT_CONFIG, why, self.port))

    def identity(self) -> rendezvous.Message:
        """What every first message of this node says."""
        place = {"rank": self.node.rank, "nodes": self.node.nodes, "run": self.config.run_id}
        return place | {"start": topology.start_names(os.environ), "host": os.uname().nodename}

    def fetch_model(self) -> None:
        """Starts the download of a hub model's weights, once, beside what follows."""
        wanted = any(hub.from_hub(config) for config in by_model(self.config))
        if self.fetching is None and not self.arguments.command and wanted:
            command = [sys.executable, "-m", "trainer.node.launch.model_fetch"]
            command += ["--config", self.arguments.config]
            command += ["--node", str(self.node.rank), "--nodes", str(self.node.nodes)]
            self.fetching = self.children.enter_context(self.child(command, self.env))

    def start_own_workers(self) -> None:
        """Starts this node's rollout workers, once Ray is up: a failed start of Ray ends every process here.

        They get nothing of Ray's environment: workers have ranks 0 and up, too, and in the ranks' beacons the
        watchdog would take them for those of the run."""
        if not self.arguments.command and self.config.fleet.gpus_per_node:
            command = own_workers.worker_command(self.config, self.node)
            env = self.env | own_workers.worker_variables(self.config, self.env)
            self.sampling = self.children.enter_context(self.child(command, env))

    def check_own_workers(self) -> None:
        """Raises LaunchEnded where this node's rollout workers have failed for good. Not after a signal: it
        may have ended them too, and the trainer has time to save."""
        if self.signals.number is not None:
            return
        code, why = own_workers.worker_failure(self.sampling)
        if code:
            raise LaunchEnded(code, why, died=True)

    def submit(self, env: dict[str, str]) -> Job:
        """Starts the job: the loop of the run's method, unless the command line names another command.

        env: further variables for its driver. Raises LaunchEnded.
        """
        assert self.ray is not None
        env = env | {STARTED_VARIABLE: str(self.began_unix_s)}
        config, arguments = self.config, self.arguments
        loop = "pass_rate" if config.evaluation.pass_rate_samples else config.method
        job_id = re.sub(r"[^\w-]", "-", config.run_id, flags=re.ASCII) + f"-{int(time.time())}"
        command = arguments.command or [
            sys.executable,
            "-m",
            f"trainer.loops.{loop}",
            "--config",
            arguments.config,
        ]
        try:
            return self.ray.submit(job_id, command, env, self.wait_s, lambda: self.signals.number is not None)
        except TimeoutError as error:
            raise LaunchEnded(EXIT_RAY, str(error)) from None
        except InterruptedError:
            raise LaunchEnded(self.signals.code, STOPPED) from None

    def look_at_host(self) -> rendezvous.Message:
        """Findings of this machine alone."""
        config, rank = self.config, self.node.rank
        judged = host.check_host(config, self.node, alone=self.arguments.preflight)
        judged += service_tokens.check_service_tokens(config, rank)
        facts = same_setup.node_facts(config)
        judged += same_setup.check_facts(facts, rank)
        if config.placement.device == "cuda":
            place = rank, config.processes_per_node
            judged += gpus.check_gpus(*place) or amd.check_amd_gpus(*place)
        ports = infiniband.infiniband_ports()
        variables, reason = infiniband.nccl_variables(ports, os.environ)
        if reason:
            self.say(reason)
            self.env |= variables
        return {
            "findings": [asdict(f) for f in judged],
            "facts": facts,
            "machine": asdict(refused.this_machine()),
            "infiniband": [asdict(p) for p in ports],
        }

    def make_prober(self, port: int) -> Prober:
        """Listens for the other nodes' probes, on every port that the job will need."""
        wanted = [*asdict(Ports()).values(), MASTER_PORT]
        return Prober(self.node.rank, self.config.run_id, port, wanted, self.node.head)

    def measure_speed(self, head: str, port: int, seconds: float, check: Callable[[], object]) -> str:
        """This node's ranks of the collectives; what went wrong, "" if nothing. What all machines of one
        image and set-up may share is no reason to take another."""
        known = network.interfaces()
        address = head if self.node.is_head else network.route_address(head)
        env = self.env | network.network_variables(network.interface_of(address, known), os.environ, known)
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        placement = self.config.placement
        command = speed.speed_command(
            seconds=seconds,
            device=placement.device,
            rank=self.node.rank,
            nodes=self.node.nodes,
            ranks_per_node=placement.workers_per_node if placement.device == "cuda" else 1,
            head=head,
            port=port,
            out=os.path.abspath(os.path.join(self.config.run.dir, SPEED_FILE)),
        )
        late = "the all-reduce between the ranks did not end"
        with self.child(command, env) as process:
            for _ in self.until(lambda: late, EXIT_CONFIG, 3 * seconds + 180.0):
                check()
                if process.poll() is not None:
                    break
        return f"{late}: the lines above say why, NCCL_DEBUG=INFO more" if process.returncode else ""

    @staticmethod
    def beacons(ray: RayNode) -> Path:
        """Where this node's ranks report the collective they are in."""
        return ray.temp / "beacons"

    def announce(self, reason: str) -> None:
        """Passes a notice to this node's ranks: save and stop."""
        if self.ray is not None:
            preempt.announce_notice(reason, Path(self.ray.env[preempt.FLAG_VARIABLE]))

    @abstractmethod
    def run(self) -> int:
        """The whole launch; returns the job's exit code. Raises LaunchEnded, ConfigError."""

    def settle(self, code: int) -> int:
        """Records how the launch ended; returns the exit code."""
        return code

    @abstractmethod
    def finish(self, code: int) -> None:
        """Notifies the other nodes and ends every process started here."""

    def close(self, code: int) -> None:
        """Ends every process that this launcher started. Keeps Ray's logs after a failure."""
        self.children.close()
        if self.prober is not None:
            self.prober.close()
        if self.ray is not None:
            keep = code not in (EXIT_OK, EXIT_PREEMPTED, EXIT_INTERRUPTED, *FINAL_EXIT_CODES)
            self.ray.close(keep)
            if keep:
                self.say(f"Ray's logs: {self.ray.temp}")
        else:
            end_descendants()

    @contextlib.contextmanager
    def child(self, command: list[str], env: dict[str, str]) -> Generator[subprocess.Popen[str]]:
        """A helper process in a session of its own, ended with the block or with this process."""
        process = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(session_of_its_own, os.getpid()),
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                end_descendants_of(process)


def end_descendants_of(process: subprocess.Popen[str]) -> None:
    """Ends a helper process and its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
            return


def cache_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Puts caches on the large volume (SPOTRL_CACHE, else the scripts' WORK) unless they are set."""
    root = env.get("SPOTRL_CACHE") or env.get("WORK")
    if not root:
        return {}
    places = {"HF_HOME": "huggingface", "VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton"}
    places["TORCHINDUCTOR_CACHE_DIR"] = "inductor"
    return {name: str(Path(root) / "cache" / place) for name, place in places.items() if name not in env}
