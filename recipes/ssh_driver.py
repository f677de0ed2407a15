"""Drives a run over ssh: copy the repository, run every node, show all logs, end all when one ends.

`python -m recipes.ssh_driver up|status|down RUN_ID`; launch.py calls it. Tokens go to the nodes on standard input and
stand in no command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from recipes import launching, run_record
from recipes.commands import resolve
from recipes.run_record import RUNS, RunRecord
from recipes.spec import Recipe
from recipes.targets import ssh
from recipes.targets.script import SECRETS, SETTINGS

GRACE_S = 60.0
"""After one node has ended, the others have this long to end by themselves."""


class Node:
    """One machine's ssh process and the thread that prints its output."""

    def __init__(self, rank: int, host: str, command: list[str], stdin: str, log: Path) -> None:
        self.rank, self.host = rank, host
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self.process.stdin
        self.process.stdin.write(stdin)
        self.process.stdin.close()
        self.thread = threading.Thread(target=self._follow, args=(log,), daemon=True)
        self.thread.start()

    def _follow(self, log: Path) -> None:
        assert self.process.stdout
        with log.open("a", buffering=1) as file:
            for line in self.process.stdout:
                file.write(f"[{self.rank}] {line}")
                print(f"[{self.rank}] {line}", end="", flush=True)


def up(record: RunRecord) -> int:
    """Copies to all machines, then runs all nodes; returns the first non-zero exit code, else 0."""
    recipe = resolve(record.recipe, record.overrides)
    hosts = ssh.hosts_of(recipe)
    task = launching.task_files(record)[0]
    code = _everywhere("copy", [ssh.copy_command(recipe, host) for host in hosts], hosts)
    code = code or _everywhere("task", [_task_command(recipe, host, task, record.run_id) for host in hosts], hosts)
    if code:
        return code
    env = {"RUN_ID": record.run_id, "BUCKET": record.bucket, "SPOTRL_SOURCE": os.environ.get("SPOTRL_SOURCE", "")}
    env |= {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    tokens = "".join(f"{name}={os.environ[name]}\n" for name in SECRETS if os.environ.get(name))
    log = RUNS / record.run_id / "launch.log"
    nodes = [
        Node(rank, host, ssh.run_command(recipe, rank, env, record.run_id), tokens, log)
        for rank, host in enumerate(hosts)
    ]
    try:
        return _wait(nodes, recipe, record)
    except KeyboardInterrupt:
        print("stopping all nodes", flush=True)
        down(record)
        return 130


def _task_command(recipe: Recipe, host: str, task: Path, run_id: str) -> list[str]:
    login, _, port = ssh.address(host)
    quiet = [option if option != "-p" else "-P" for option in ssh.options(recipe, port)]
    return ["scp", "-q", *quiet, str(task), f"{login}:{ssh.DIRECTORY}/.cache/{run_id}.sh"]


def _everywhere(what: str, commands: list[list[str]], hosts: list[str]) -> int:
    """Runs one command per machine, all at once; says which machine failed."""
    started = time.monotonic()
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    worst = 0
    for host, process in zip(hosts, running, strict=True):
        output = process.communicate()[0]
        if process.returncode:
            last = (output.strip().splitlines() or ["no output"])[-1]
            print(f"launch.py: {what} to {host} failed ({process.returncode}): {last}", file=sys.stderr)
            worst = 2
    if not worst:
        print(f"{what}: {len(hosts)} machines in {time.monotonic() - started:.1f} s", flush=True)
    return worst


def _wait(nodes: list[Node], recipe: Recipe, record: RunRecord) -> int:
    """Until all have ended; once one has, the others get GRACE_S and are then ended."""
    codes: dict[int, int] = {}
    first_end = 0.0
    while len(codes) < len(nodes):
        for node in nodes:
            code = node.process.poll()
            if code is not None and node.rank not in codes:
                codes[node.rank] = code
                first_end = first_end or time.monotonic()
                print(f"node {node.rank} ({node.host}) ended with {code}", flush=True)
        if first_end and time.monotonic() - first_end > GRACE_S and len(codes) < len(nodes):
            late = [node for node in nodes if node.rank not in codes]
            print(f"ending {', '.join(node.host for node in late)}: still running {GRACE_S:.0f} s later", flush=True)
            _everywhere("stop", [ssh.stop_command(recipe, n.host, record.run_id) for n in late], [n.host for n in late])
            first_end = time.monotonic()
        time.sleep(0.2)
    for node in nodes:
        node.thread.join(5)
    return next((code for _, code in sorted(codes.items()) if code), 0)


def status(record: RunRecord) -> int:
    """One line per machine: whether the node's process group is alive."""
    recipe = resolve(record.recipe, record.overrides)
    group = f"{ssh.DIRECTORY}/.cache/{record.run_id}.pgid"
    for host in ssh.hosts_of(recipe):
        login, _, port = ssh.address(host)
        remote = f"test -f {group} && kill -0 -- -$(cat {group}) 2>/dev/null && echo running || echo ended"
        done = subprocess.run(["ssh", *ssh.options(recipe, port), login, remote], capture_output=True, text=True)
        print(f"{host}: {done.stdout.strip() or 'unreachable: ' + done.stderr.strip()}")
    return 0


def down(record: RunRecord) -> int:
    """Ends the run on all machines."""
    recipe = resolve(record.recipe, record.overrides)
    hosts = ssh.hosts_of(recipe)
    return _everywhere("stop", [ssh.stop_command(recipe, host, record.run_id) for host in hosts], hosts)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    sys.exit({"up": up, "status": status, "down": down}[sys.argv[1]](run_record.load(sys.argv[2])))
