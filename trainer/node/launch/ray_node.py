"""Ray on one node, and the training job on the head, as processes ended by pid.

Another Ray may run on the machine (SkyPilot's listens on 6380): `ray stop` would end it too, so it is never
called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from trainer.config import ConfigError
from trainer.system.processes import end_with_parent
from trainer.system.web_request import send_request

ROOT = Path(__file__).resolve().parents[3]

TUNING = {
    # A lost node is detected after about 9 s; Ray's own settings take 64 s (measured with the link down).
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # `ray job stop` waits as long as a checkpoint may need.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
    # Ray's own logs grow by counts of events that nobody reads, and a file of them is kept up to 3 GB.
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_ROTATION_MAX_BYTES": str(8 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # Ray would run the ranks at niceness 15.
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "PYTHONUNBUFFERED": "1",
}


RAY = (
    "import sys; sys.modules.update({'ray.serve.scripts': None, 'ray.util.state.state_cli': None}); "
    "from ray.scripts.scripts import main; main()"
)
"""Ray's command line without two groups of commands that take it 2 s of CPU to import."""


UNBLOCK = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Ray blocks SIGINT in what it starts: without this, Ctrl-C never reaches the job."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Every port that Ray listens on, apart from the defaults of other Rays on the same machine."""

    gcs: int = 6379
    dashboard: int = 8265
    client: int = 6382
    node_manager: int = 6383
    object_manager: int = 6384
    agent_http: int = 6385
    agent_grpc: int = 6386
    runtime_env: int = 6387
    metrics: int = 6388
    first_worker: int = 21000
    last_worker: int = 27999

    @classmethod
    def choose(cls, alone: bool) -> Ports:
        """Fixed ports, so that a firewall can open them; on a single node free ones replace those taken.

        With several nodes, raises ConfigError naming a port that is taken.
        """
        chosen = {}
        for f in fields(cls):
            port = int(f.default)  # ty: ignore[invalid-argument-type]
            if f.name.endswith("_worker") or _is_free(port):
                chosen[f.name] = port
            elif alone:
                chosen[f.name] = _free_port()
            else:
                raise ConfigError(
                    f"port {port} ({f.name}) is taken on {socket.gethostname()}: end what listens there"
                )
        # another run is on this machine: avoid its workers' port range too
        if alone and chosen["gcs"] != 6379:
            start = 28000 + 1000 * (chosen["gcs"] % 4)
            chosen |= {"first_worker": start, "last_worker": start + 999}
        return cls(**chosen)


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def session_of_its_own(parent: int) -> None:
    """Lets no signal of our terminal reach a new child, which the kernel ends if we are killed."""
    os.setsid()
    end_with_parent(parent, signal.SIGTERM)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that all of them can be ended."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_descendants(grace_s: float = 5.0) -> int:
    """Ends every descendant of this process; returns how many had to be killed."""
    everyone = psutil.Process().children(recursive=True)
    for process in everyone:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(everyone, timeout=grace_s)
    deadline = time.monotonic() + 10.0
    killed = 0
    while (alive := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in alive:
            killed += _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=1.0)
    return killed


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def ray_temporary_folder(env: Mapping[str, str]) -> Path:
    """Local folder for Ray: SPOTRL_TMP, else TMPDIR unless Ray's socket names would not fit under it, else
    /tmp.

    Raises ConfigError if SPOTRL_TMP is too long.
    """
    longest = 107 - len("/spotrl-12345678/r/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store")
    if given := env.get("SPOTRL_TMP"):
        if len(given) > longest:
            raise ConfigError(
                f"SPOTRL_TMP {given} is too long for socket names: choose one of at most {longest} bytes"
            )
        return Path(given)
    theirs = env.get("TMPDIR", "")
    return Path(theirs) if theirs and len(theirs) <= longest and Path(theirs).is_dir() else Path("/tmp")


class RayEnded(RuntimeError):
    """Ray did not start on this machine, or ended while it did."""


class RayNode:
    """Ray's processes on this node."""

    def __init__(
        self, *, address: str, ports: Ports, cpus: int, gpus: int, env: Mapping[str, str], token: str = ""
    ):
        """address: this node's on the job's network. token: the head's."""
        self.temp = Path(tempfile.mkdtemp(prefix="spotrl-", dir=ray_temporary_folder(env)))
        self.ray_folder = self.temp / "r"
        """Ray's own, which it opens to every user; ours around it stays closed."""
        self.address, self.ports = address, ports
        self.cpus, self.gpus = cpus, gpus
        self.token = token or secrets.token_hex(32)
        token_file = self.temp / "token"
        token_file.touch(0o600)
        token_file.write_text(self.token)
        path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        ours = {"RAY_AUTH_TOKEN_PATH": str(token_file), "PYTHONPATH": path}
        self.env = {**{k: v for k, v in TUNING.items() if k not in env}, **env, **ours}
        self.env.pop("RAY_ADDRESS", None)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.temp / "ray-start.log"
        self.dashboard_host = ""

    def start_head(self, dashboard_host: str) -> None:
        """Starts the head with its dashboard; returns at once."""
        self.dashboard_host = dashboard_host
        self._start(
            "--head",
            f"--port={self.ports.gcs}",
            f"--dashboard-host={dashboard_host}",
            f"--dashboard-port={self.ports.dashboard}",
            f"--ray-client-server-port={self.ports.client}",
            "--no-monitor",
        )

    def start_worker(self, head: str) -> None:
        """Joins the head at address:port; returns at once."""
        self._start(f"--address={head}")

    def _start(self, *role: str) -> None:
        p = self.ports
        command = [sys.executable, "-c", RAY, "start", "--block", "--disable-usage-stats", *role]
        command += [f"--node-ip-address={self.address}", f"--temp-dir={self.ray_folder}"]
        command += [
            f"--num-cpus={self.cpus}",
            f"--num-gpus={self.gpus}",
            f"--metrics-export-port={p.metrics}",
        ]
        command += [f"--node-manager-port={p.node_manager}", f"--object-manager-port={p.object_manager}"]
        command += [f"--dashboard-agent-listen-port={p.agent_http}"]
        command += [
            f"--dashboard-agent-grpc-port={p.agent_grpc}",
            f"--runtime-env-agent-port={p.runtime_env}",
        ]
        command += [f"--min-worker-port={p.first_worker}", f"--max-worker-port={p.last_worker}"]
        if not self.env.get("SPOTRL_WORKER_LOGS"):
            command.append("--include-log-monitor=false")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=self.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(session_of_its_own, os.getpid()),
            )

    def ready(self) -> bool:
        """Whether this node's part is up. Raises RayEnded with the last lines of its log if it ended."""
        if not self.alive():
            raise RayEnded("Ray ended on this node: " + self.complaint())
        log = self.log.read_bytes()
        dashboard_log = self.ray_folder / "session_latest" / "logs" / "dashboard.log"
        later = dashboard_log.read_bytes() if dashboard_log.exists() else b""
        # Ray itself would run without its dashboard.
        if b"already occupied" in log or b"Failed to find a valid port" in later:
            raise RayEnded(f"port {self.ports.dashboard} was taken before Ray's dashboard listened")
        if b"Ray runtime started" not in log or not self.dashboard_host:
            return b"Ray runtime started" in log
        try:  # the head's dashboard takes jobs
            return bool(self.request("GET", "/api/version"))
        except OSError:
            return False

    def alive(self) -> bool:
        """Whether Ray is running; it exits when one of its parts dies."""
        return self.process is not None and self.process.poll() is None

    def stopped(self) -> str:
        """Ray's own processes here that are stopped, by a debugger or a control group's freezer."""
        stopped = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children() if self.process else ():
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(f"{process.name()} (process {process.pid})")
        return " and ".join(stopped)

    def complaint(self) -> str:
        """The last line of Ray's own log that is not empty."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[-300:] if lines else "it wrote nothing"

    def close(self, keep_logs: bool) -> None:
        """Ends Ray and its descendants. Keeps its logs only after a failure."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(8.0)
        end_descendants(grace_s=2.0)
        if not keep_logs:
            shutil.rmtree(self.temp, ignore_errors=True)

    # --- the job, on the head ---------------------------------------------------------------------------

    @property
    def dashboard(self) -> str:
        """URL of the dashboard and of the jobs' interface."""
        host = "127.0.0.1" if self.dashboard_host == "0.0.0.0" else self.dashboard_host
        return f"http://{host}:{self.ports.dashboard}"

    def request(self, method: str, path: str, body: dict | None = None, timeout_s: float = 10.0) -> dict:
        """One call of Ray's REST interface. Raises OSError (urllib's errors are such)."""
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        reply = send_request(
            self.dashboard + path, method=method, body=data, headers=headers, timeout_s=timeout_s, direct=True
        )
        return json.loads(reply or b"{}")

    def submit(
        self,
        job_id: str,
        command: list[str],
        env: Mapping[str, str],
        deadline_s: float,
        stop: Callable[[], bool],
    ) -> Job:
        """Submits `command`. Raises TimeoutError with Ray's last reply, InterruptedError."""
        pid_file = self.temp / f"{job_id}.pid"
        variables = [f"{name}={value}" for name, value in env.items()]
        words = ["env", *variables, sys.executable, "-c", UNBLOCK, *command]
        entrypoint = f'cd "{ROOT}" && echo $$ > "{pid_file}" && exec {shlex.join(words)}'
        deadline = time.monotonic() + deadline_s
        last = ""
        while time.monotonic() < deadline:
            if stop():
                raise InterruptedError
            try:
                self.request("POST", "/api/jobs/", {"entrypoint": entrypoint, "submission_id": job_id}, 60.0)
                return Job(self, job_id, pid_file)
            except urllib.error.HTTPError as error:  # the head's agent is not ready yet
                last = error.read().decode(errors="replace").strip().splitlines()[-1][:300]
            except OSError as error:
                last = str(error)
            time.sleep(0.2)
        raise TimeoutError(f"Ray did not take the job within {deadline_s:.0f} s: {last}")


@dataclass(frozen=True)
class JobEnd:
    status: Literal["SUCCEEDED", "FAILED", "STOPPED"]
    code: int | None
    """Exit code of the driver, negative for a signal; None if Ray itself ended or never started it."""
    message: str
    """The first line of Ray's message."""


class Job:
    """The training job; its driver runs on the head."""

    def __init__(self, node: RayNode, job_id: str, pid_file: Path):
        self.node, self.id = node, job_id
        self._pid_file = pid_file
        self.log = node.ray_folder / "session_latest" / "logs" / f"job-driver-{job_id}.log"

    def pid(self) -> int | None:
        """Process id of the driver once it runs."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    def signal(self, number: int) -> bool:
        """Sends a signal to the driver; False if it is not running."""
        pid = self.pid()
        try:
            return pid is not None and os.kill(pid, number) is None
        except ProcessLookupError:
            return False

    def ended(self) -> JobEnd | None:
        """How it ended, or None. Raises OSError if Ray does not answer."""
        info = self.node.request("GET", f"/api/jobs/{self.id}")
        if info["status"] not in ("SUCCEEDED", "FAILED", "STOPPED"):
            return None
        message = next((line for line in (info.get("message") or "").splitlines() if line.strip()), "")
        code = 0 if info["status"] == "SUCCEEDED" else info.get("driver_exit_code")
        return JobEnd(info["status"], code, message[:300])


PUBLISHED = ".cache/spotrl"
"""Under the home directory on the head: dashboards' addresses, for `launch.py dashboard`. Its token opens the
cluster: the file has mode 600, and never lies in the run's folder or the bucket."""


def publish_dashboard(run_id: str, url: str, token_path: str) -> str:
    """Writes address and token of a run's dashboard, if the home can be written; returns the line to show."""
    with contextlib.suppress(OSError):
        path = _published(run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"url": url, "token": Path(token_path).read_text()}, file)
    return f"dashboard {url}  (RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_path})"


def withdraw_dashboard(run_id: str) -> None:
    """Removes the file, once the cluster is gone."""
    with contextlib.suppress(OSError):
        _published(run_id).unlink(missing_ok=True)


def _published(run_id: str) -> Path:
    return Path.home() / PUBLISHED / f"{run_id}.json"
