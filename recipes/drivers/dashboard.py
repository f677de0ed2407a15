"""`dashboard`: a tunnel from the desk to Ray's dashboard and jobs interface on a run's head, and the token
for it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import urllib.parse
from pathlib import Path

from recipes.drivers import kubernetes_driver, platforms
from recipes.platforms import ssh
from recipes.presets import resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

PUBLISHED = ".cache/spotrl/{run_id}.json"
"""Under the home directory of the head (trainer/node/launch/dashboard.py): address and token."""
PORT = 8265


def open_tunnel(run: str, dry_run: bool = False) -> int:
    """Reads address and token from the head, then holds the tunnel until Ctrl-C. Raises ConfigError."""
    record = run_record.load_record(run)
    path = PUBLISHED.format(run_id=run)
    on_pod = record.target == "kubernetes"
    login = [] if on_pod else ssh_to_head(record)
    ask = [*login, f"cat {path}"] if login else ["cat", str(Path.home() / path)]
    if on_pod:
        pod = "pod/HEAD" if dry_run else kubernetes_driver.head_pod(record)
        ask = [*platforms.kubectl(record), "exec", pod, "--", "sh", "-c", f'cat "$HOME"/{path}']
    if dry_run:
        print(shlex.join(ask))
        return 0
    done = subprocess.run(ask, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "no answer").splitlines()[-1]
        if "No such file" in said:
            said = "it has not begun, or has ended"
        raise ConfigError(f"no dashboard of {run} ({said}): {_cure(record)}")
    told = json.loads(done.stdout)
    there = urllib.parse.urlsplit(told["url"])
    if record.target in ("slurm", "pbs") and there.hostname not in ("127.0.0.1", socket.gethostname()):
        login = ["ssh", str(there.hostname)]  # from the login node to the head
    address, tunnel = told["url"], None
    if login or on_pod:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
    if on_pod:
        tunnel = [*platforms.kubectl(record), "port-forward", pod, f"{port}:{there.port}"]
    elif login:
        forward = [
            "-N",
            "-o",
            "ExitOnForwardFailure=yes",
            "-L",
            f"127.0.0.1:{port}:{there.hostname}:{there.port}",
        ]
        tunnel = [login[0], *forward, *login[1:]]
    print(describe_dashboard(address, _keep(run, told["token"])), flush=True)
    try:
        return subprocess.run(tunnel).returncode if tunnel else 0
    except KeyboardInterrupt:
        return 0


def ssh_to_head(record: RunRecord) -> list[str]:
    """The ssh command that logs in to a run's head; [] where they share a home directory. Raises
    ConfigError."""
    match record.target.partition("-")[0]:
        case "local" | "slurm" | "pbs":
            return []
        case "ssh":
            recipe = resolve(record.recipe, record.overrides)
            login, _, port = ssh.parse_address(ssh.hosts_of(recipe)[0])
            return ["ssh", *ssh.ssh_options(recipe, port), login]
        case "skypilot" if record.managed:
            raise ConfigError(
                f"{record.run_id} is a managed job, and only its controller knows the machines: use `status"
                " --watch`"
            )
        case "skypilot":
            return ["ssh", "-o", "BatchMode=yes", record.run_id]
        case "dstack":
            return ["ssh", "-o", "BatchMode=yes", platforms.dstack_name(record.run_id)]
    raise AssertionError(record.target)


def _cure(record: RunRecord) -> str:
    if record.target.startswith("dstack"):
        attach = f"dstack attach {platforms.dstack_name(record.run_id)}"
        return f"is it running? `{attach}` in another terminal opens its ssh"
    return f"is it running? `python3 launch.py status {record.run_id}` says"


def _keep(run: str, token: str) -> Path:
    path = (run_record.RUNS / run / "ray.token").absolute()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return path


def free_port() -> int:
    """8265, or a free port where that is taken."""
    for port in (PORT, 0):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return s.getsockname()[1]
    raise AssertionError("port 0 is always free")


def describe_dashboard(address: str, token: Path) -> str:
    """What a person types next."""
    return (
        f"dashboard: {address} (it asks for the token in {token})\n"
        f"jobs: export RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}\n"
        "      ray job list; ray job logs -f ID; ray job stop ID; ray job submit -- COMMAND\n"
        "Ctrl-C closes the tunnel; the run goes on"
    )
