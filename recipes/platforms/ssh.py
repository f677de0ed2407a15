"""Bare machines over ssh: the script that each node runs; `drivers/ssh_driver.py` copies, starts and stops
it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult

from recipes.platforms import clouds, programs, script
from recipes.platforms.base import Commands, LaunchGiven, Platform, ssh_tunnel
from recipes.presets import resolve
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError, never_sent

DIRECTORY = "spotrl"
"""Where the repository stands on the machines, under the home directory."""
NOT_COPIED = (".git", ".venvs", ".venv", "runs", ".cache", "__pycache__", ".*_cache")
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3",
               "StrictHostKeyChecking=accept-new")  # fmt: skip
NOTICE_S = 60
"""Time to save in after a stop. A bare machine is taken by nobody else: the only notice is our own stop
command."""
STOP_S = NOTICE_S + 15
"""Until a node that does not end is killed."""


class Ssh(Platform):
    program = "ssh"
    title = "`ssh`"
    hint = "install an ssh client and rsync"
    driven_from_here = True
    copies_tree = True

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """Set-up and run script of every node. SPOTRL_NODE_RANK, SPOTRL_NODES and SPOTRL_PEERS come from the
        driver."""
        recipe = run.recipe
        begin = script.preamble(recipe, recipe.site.shared_dir or "$HOME/spotrl-work")
        command = f"python3 launch.py up {recipe.name} --target ssh"
        head = f"#!/usr/bin/env bash\n# {recipe.description}: one node. Driven by `{command}`.\n"
        body = begin + script.setup_commands(recipe) + script.write_config(recipe)
        return {f"{recipe.name}.sh": head + body + f"exec {script.node_command(recipe)}\n"}

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        return frozenset({"site.hosts", "site.ssh_key", "site.shared_dir"})

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        return self.own_commands(record, given, has_status=True)

    def check_machines(self, recipe: Recipe) -> None:
        hosts_of(recipe)

    def check(self, recipe: Recipe, record: RunRecord, task: str) -> None:
        if not programs.find_program("rsync"):
            raise ConfigError(
                "rsync is not installed: it copies the repository to the machines, so install it"
            )

    def shown_commands(self, record: RunRecord, files: Sequence[Path]) -> list[str]:
        recipe = resolve(record.recipe, record.overrides)
        env = run_environment(record)
        lines = ["# --- which runs, with tokens on standard input"]
        for rank, host in enumerate(hosts_of(recipe)):
            lines.append(shlex.join(copy_command(recipe, host)))
            lines.append(shlex.join(task_command(recipe, host, str(files[0]), record.run_id)))
            lines.append(shlex.join(run_command(recipe, rank, env, record.run_id)))
        return lines

    def read_from_head(self, record: RunRecord, path: str, dry_run: bool) -> list[str]:
        return [*head_login(record), f"cat {path}"]

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        return ssh_tunnel(head_login(record), port, there)


SSH = Ssh(
    name="ssh",
    max_nodes=64,
    gpus=clouds.ANY,
    network_gbit_s={"": 100},
    note="bare machines by hand: --hosts a,b,c,d, head first",
)


def parse_address(host: str) -> tuple[str, str, int]:
    """(login, address among the nodes, port) of `[user@]address[:port][/private address]`. Raises
    ConfigError."""
    public, slash, private = host.partition("/")
    login, colon, port = public.partition(":")
    odd = any(c.isspace() for c in host) or host.startswith("-") or (slash and not private)
    if not login or (colon and not port.isdigit()) or odd:
        raise ConfigError(f"host {host!r}: write it as [user@]address[:port][/private address]")
    return login, private or login.rpartition("@")[2], int(port or 22)


def hosts_of(recipe: Recipe) -> list[str]:
    """The recipe's machines, as many as it wants nodes. Raises ConfigError."""
    hosts = list(recipe.site.hosts)
    wanted = recipe.cluster.nodes * recipe.jobs
    if len(hosts) != wanted:
        section = "sample" if recipe.kind == "sample" else "site"
        given = f"{len(hosts) or 'none'} were given: --set {section}.hosts=[first,second]"
        raise ConfigError(f"{recipe.name} wants {wanted} machines and {given}")
    if len(set(hosts)) != len(hosts):
        raise ConfigError("site.hosts names a machine twice: each node must be a machine of its own")
    for host in hosts:
        parse_address(host)
    return hosts


def on_machine(recipe: Recipe, host: str, *command: str) -> list[str]:
    """ssh to a machine."""
    login, _, port = parse_address(host)
    return ["ssh", *ssh_options(recipe, port), login, *command]


def ssh_options(recipe: Recipe, port: int) -> list[str]:
    """Options of ssh: no prompts, keep-alives that notice a dead machine in half a minute."""
    key = ["-i", recipe.site.ssh_key] if recipe.site.ssh_key else []
    return [*key, "-p", str(port), *(word for option in SSH_OPTIONS for word in ("-o", option))]


def copy_command(recipe: Recipe, host: str) -> list[str]:
    """rsync of the repository to one machine."""
    login, _, port = parse_address(host)
    shell = shlex.join(["ssh", *ssh_options(recipe, port)])
    keep_out = [f"--exclude={name}" for name in NOT_COPIED]
    keep_out.append(f"--exclude-from={never_sent.IN_TREE}")
    there = f"mkdir -p {DIRECTORY}/.cache && rsync"
    command = ["rsync", "-az", "--delete", *keep_out, "--rsync-path", there, "-e", shell]
    return [*command, "./", f"{login}:{DIRECTORY}/"]


def task_command(recipe: Recipe, host: str, task: str, run_id: str) -> list[str]:
    """scp of the task file to one machine."""
    login, _, port = parse_address(host)
    # scp's letter for the port is another.
    options = ["-P" if option == "-p" else option for option in ssh_options(recipe, port)]
    return ["scp", "-q", *options, task, f"{login}:{DIRECTORY}/.cache/{run_id}.sh"]


def run_environment(record: RunRecord) -> dict[str, str]:
    """What every node is given by name and value, besides its place."""
    env = {
        "RUN_ID": record.run_id,
        "BUCKET": record.bucket,
        "SPOTRL_SOURCE": os.environ.get("SPOTRL_SOURCE", ""),
    }
    if "SPOTRL_LAUNCH" in os.environ:
        env["SPOTRL_LAUNCH"] = os.environ["SPOTRL_LAUNCH"]
    env["SPOTRL_NOTICE_S"] = os.environ.get("SPOTRL_NOTICE_S", str(NOTICE_S))
    return env | {name: os.environ[name] for name in script.SETTINGS if os.environ.get(name)}


def head_login(record: RunRecord) -> list[str]:
    """ssh to a run's head."""
    recipe = resolve(record.recipe, record.overrides)
    return on_machine(recipe, hosts_of(recipe)[0])


def run_command(
    recipe: Recipe, rank: int, env: dict[str, str], run_id: str, follow: bool = True
) -> list[str]:
    """ssh command that starts a node, shows its log and leaves with its exit code; without `follow` it only
    starts it.

    The node writes its log to its own disk, so a laptop that goes to sleep does not end the run. Its process
    group is written next to it, so that `stop_command` ends exactly this run.
    """
    hosts = hosts_of(recipe)
    values = env | {
        "SPOTRL_NODE_RANK": str(rank),
        "SPOTRL_NODES": str(len(hosts)),
        "SPOTRL_PEERS": " ".join(parse_address(h)[1] for h in hosts),
    }
    if recipe.cluster.gpus_per_node:
        values["SPOTRL_GPUS_PER_NODE"] = str(recipe.cluster.gpus_per_node)
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    group, log = f".cache/{run_id}.pgid", f".cache/{run_id}.log"
    lines = [
        f"cd {DIRECTORY} || exit 2",
        f"if {running_condition(group)}; then echo 'error: {run_id} is still running here: "
        "`python3 launch.py down` ends it'; exit 2; fi",
        # Tokens arrive on standard input as NAME=value lines, so that no process list shows them.
        'while IFS= read -r line; do export "$line"; done',
        f"export {exports}",
        f": > {log}",
        f"setsid bash .cache/{run_id}.sh </dev/null >>{log} 2>&1 & node=$!",
        f"echo $node > {group}",
        # Until setsid has made the group, the run would be taken for ended.
        "while kill -s 0 $node 2>/dev/null && ! kill -s 0 -- -$node 2>/dev/null; do sleep 0.05; done",
    ]
    if follow:
        lines += [
            f"tail -n +1 -s 0.2 -F --pid=$node {log} 2>/dev/null & tail=$!",
            "wait $node; code=$?; wait $tail; exit $code",
        ]
    return on_machine(recipe, hosts[rank], "\n".join(lines))


def running_condition(group: str) -> str:
    """Shell condition: the process group whose number is in the file `group` has a process."""
    return f"test -s {group} && kill -s 0 -- -$(cat {group}) 2>/dev/null"


def log_command(recipe: Recipe, host: str, run_id: str) -> list[str]:
    """ssh command that follows a node's log."""
    return on_machine(recipe, host, f"tail -n 100 -F {DIRECTORY}/.cache/{run_id}.log 2>/dev/null")


def stop_command(recipe: Recipe, host: str, run_id: str, patience_s: int = STOP_S) -> list[str]:
    """ssh command that ends a node's process group: TERM, on which the run saves, and KILL after
    `patience_s`."""
    group = f"{DIRECTORY}/.cache/{run_id}.pgid"
    remote = (
        f"{running_condition(group)} || exit 0; g=$(cat {group}); kill -s TERM -- -$g; "
        f"for i in $(seq {5 * patience_s}); do kill -s 0 -- -$g 2>/dev/null || exit 0; sleep 0.2; done; "
        "kill -s KILL -- -$g"
    )
    return on_machine(recipe, host, remote)
