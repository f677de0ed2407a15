"""Drives a run over ssh: copy the repository, start every node, show all logs, end all when one ends.

Tokens go to the nodes on standard input and stand in no command line. The nodes outlive this process, unless
Ctrl-C or SIGTERM asks it to end them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from recipes.platforms import programs, ssh
from recipes.platforms.script import secret_names
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RUNS, RunRecord

GRACE_S = 60.0
"""After one node has ended, the others have this long to end by themselves."""


class SshNode:
    """One machine's ssh process and the thread that prints its output, and keeps it in `log`."""

    def __init__(self, rank: int, host: str, command: list[str], stdin: str, log: Path) -> None:
        self.rank = rank
        self.host = host
        # In a session of its own: Ctrl-C is for this driver, and the log is shown until the node has ended.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # the machine is away: its exit code says so
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

    def close(self) -> None:
        """Shows the rest of the log, and ends ssh itself if it stays."""
        self.thread.join(5)
        if self.process.poll() is None:
            self.process.terminate()


def up(record: RunRecord, follow: bool = True) -> int:
    """Copies to all machines, then runs all nodes; returns the first non-zero exit code, else 0."""
    recipe = resolve(record.recipe, record.overrides)
    hosts = ssh.hosts_of(recipe)
    task = record.task_files()[0]
    log = RUNS / record.run_id / "launch.log"
    copies = {host: ssh.copy_command(recipe, host) for host in hosts}
    tasks = {host: ssh.task_command(recipe, host, str(task), record.run_id) for host in hosts}
    code = _everywhere("copy", copies) or _everywhere("task", tasks)
    if code:
        return code

    env = ssh.run_environment(record)
    names = filter(os.environ.get, secret_names(recipe))
    tokens = "".join(f"{name}={os.environ[name]}\n" for name in names)
    nodes: list[SshNode] = []
    try:
        for rank, host in enumerate(hosts):
            command = ssh.run_command(recipe, rank, env, record.run_id, follow)
            nodes.append(SshNode(rank, host, command, tokens, log))
        return _wait(nodes, recipe, record) if follow else max(node.process.wait() for node in nodes)
    except KeyboardInterrupt:
        print("stopping all nodes, which save first; Ctrl-C again ends them at once", flush=True)
        try:
            down(record)
        except KeyboardInterrupt:
            down(record, patience_s=0)
        for node in nodes:
            node.close()
        return 130


def start(record: RunRecord) -> int:
    """Starts all nodes and leaves them to themselves."""
    code = up(record, follow=False)
    if not code:
        print(f"the run continues: `python3 launch.py logs {record.run_id}` follows it, `down` ends it")
    return code


def _everywhere(title: str, commands: dict[str, list[str]]) -> int:
    """Runs one command per machine, all at once; says which machine failed. commands: by host."""
    started = time.monotonic()
    running = {}
    for host, command in commands.items():
        running[host] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    worst = 0
    for host, process in running.items():
        output = process.communicate()[0]
        if process.returncode:
            last = programs.last_line(output, "no output")
            print(f"launch.py: {title} to {host} failed ({process.returncode}): {last}", file=sys.stderr)
            worst = 2
    if not worst:
        print(f"{title}: {len(commands)} machines in {time.monotonic() - started:.1f} s", flush=True)
    return worst


def _wait(nodes: list[SshNode], recipe: Recipe, record: RunRecord) -> int:
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
        alone = recipe.kind == "sample"  # each machine ends by itself
        grace_is_over = first_end and time.monotonic() - first_end > GRACE_S
        if grace_is_over and len(codes) < len(nodes) and not alone:
            left = [node.host for node in nodes if node.rank not in codes]
            stops = {host: ssh.stop_command(recipe, host, record.run_id) for host in left}
            print(f"ending {', '.join(stops)}: still running {GRACE_S:.0f} s later", flush=True)
            _everywhere("stop", stops)
            first_end = time.monotonic()
        time.sleep(0.2)
    for node in nodes:
        node.thread.join(5)
    in_order = [codes[rank] for rank in sorted(codes)]
    return next(filter(None, in_order), 0)


def status(record: RunRecord) -> int:
    """One line per machine: whether the node's process group is alive."""
    recipe = resolve(record.recipe, record.overrides)
    group = f"{ssh.DIRECTORY}/.cache/{record.run_id}.pgid"
    for host in ssh.hosts_of(recipe):
        command = ssh.on_machine(
            recipe, host, f"{ssh.running_condition(group)} && echo running || echo ended"
        )
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"{host}: {done.stdout.strip() or 'unreachable: ' + done.stderr.strip()}")
    return 0


def logs(record: RunRecord) -> int:
    """Follows the logs of all machines until Ctrl-C; the run continues."""
    recipe = resolve(record.recipe, record.overrides)
    nodes = []
    for rank, host in enumerate(ssh.hosts_of(recipe)):
        command = ssh.log_command(recipe, host, record.run_id)
        nodes.append(SshNode(rank, host, command, "", Path(os.devnull)))
    try:
        return max(node.process.wait() for node in nodes)
    except KeyboardInterrupt:
        for node in nodes:
            node.process.terminate()
        return 0


def down(record: RunRecord, patience_s: int = ssh.STOP_S) -> int:
    """Ends the run on all machines; what is still there after `patience_s` is killed."""
    recipe = resolve(record.recipe, record.overrides)
    hosts = ssh.hosts_of(recipe)
    return _everywhere("stop", {h: ssh.stop_command(recipe, h, record.run_id, patience_s) for h in hosts})
