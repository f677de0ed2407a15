"""This node's place in the job: rank, peers and head, from the platform's variables; and the network that
the nodes share.

`read` is a pure function of the environment variables. Explicit SPOTRL_* variables win over the platforms':

    SPOTRL_NODES, SPOTRL_NODE_RANK, SPOTRL_HEAD    number of nodes, this node's place, the head's address
    SPOTRL_PEERS                                   or: all addresses, head first, separated by commas
    SPOTRL_RESTART                                 how often the platform has restarted all nodes together
    SPOTRL_GPUS_PER_NODE                           0 for none; by default counted by nvidia-smi or rocm-smi
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.system.errors import ConfigError

START_VARIABLES = (
    "SPOTRL_LAUNCH",
    "SPOTRL_RESTART",
    "SKYPILOT_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "PBS_JOBID",
)
"""Variables that all nodes of one start have alike, and another start of the same run has otherwise."""

Platform = Literal["spotrl", "skypilot", "dstack", "slurm", "pbs", "runpod", "torchrun", "local"]


@dataclass(frozen=True, kw_only=True)
class NodeEnvironment:
    """One node of the job."""

    platform: Platform
    """What started it."""
    rank: int
    """0 is the head."""
    nodes: int
    """Nodes of the job."""
    head: str
    """Address or host name of the head, as the platform gives it."""
    peers: tuple[str, ...]
    """Addresses by rank where the platform gives them all, else empty."""
    gpus_per_node: int | None
    """None if the platform does not set it."""

    @property
    def is_head(self) -> bool:
        """Whether this node runs Ray's head and the job."""
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """A node's name in a message."""
        return f"node {rank} ({self.peers[rank]})" if rank < len(self.peers) else f"node {rank}"


def misplaced_rank(
    node: NodeEnvironment, own: Iterable[str], resolve: Callable[[str], list[str]]
) -> int | None:
    """The rank whose address this node has, where that is not its own rank; None where nothing contradicts
    its rank. own: this machine's addresses. resolve: addresses of a host name."""
    own = set(own)
    holds = []
    for rank, peer in enumerate(node.peers):
        addresses = [address for address in resolve(peer) if not address.startswith("127.")]
        if own & set(addresses):
            holds.append(rank)
    if not holds or node.rank in holds:
        return None
    return holds[0]


class PlatformVariables(NamedTuple):
    """A platform's variables. Of several names, which blanks separate, the first that is set counts."""

    platform: Platform
    marks: str
    """All of them are set on its nodes, and nowhere else."""
    rank: str = ""
    nodes: str = ""
    peers: str = ""
    head: str = ""
    gpus: str = "SPOTRL_GPUS_PER_NODE"


OURS = PlatformVariables("spotrl", "", "SPOTRL_NODE_RANK", "SPOTRL_NODES", "SPOTRL_PEERS", "SPOTRL_HEAD")
DSTACK = ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_NODES_IPS", "DSTACK_MASTER_NODE_IP")
SKYPILOT = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "", "SKYPILOT_NUM_GPUS_PER_NODE")
SLURM = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES")
SLURM_NODES = ("SLURM_STEP_NODELIST SLURM_JOB_NODELIST", "", "SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE")
RUNPOD = ("NODE_RANK", "NUM_NODES", "", "PRIMARY_ADDR", "NUM_TRAINERS")
TORCHRUN = ("GROUP_RANK RANK", "GROUP_WORLD_SIZE WORLD_SIZE", "", "MASTER_ADDR")
PLATFORMS = (
    OURS._replace(marks="SPOTRL_NODES"),
    OURS._replace(marks="SPOTRL_PEERS"),
    OURS._replace(marks="SPOTRL_NODE_RANK"),
    PlatformVariables("dstack", "DSTACK_NODES_NUM", *DSTACK, "DSTACK_GPUS_PER_NODE"),
    PlatformVariables("skypilot", "SKYPILOT_NODE_IPS", *SKYPILOT),
    PlatformVariables("slurm", "SLURM_JOB_ID SLURM_NODEID", *SLURM, *SLURM_NODES),
    PlatformVariables("pbs", "PBS_NODEFILE"),
    PlatformVariables("runpod", "PRIMARY_ADDR NUM_NODES", *RUNPOD),
    PlatformVariables("torchrun", "GROUP_WORLD_SIZE", *TORCHRUN),
    PlatformVariables("torchrun", "MASTER_ADDR WORLD_SIZE", *TORCHRUN),
    PlatformVariables("local", ""),
)


def read_node_environment(
    env: Mapping[str, str], hostname: str = "", read_text: Callable[[str], str] | None = None
) -> NodeEnvironment:
    """This node's place. Raises ConfigError naming the variable that is missing or contradicts the others."""
    row = next(row for row in PLATFORMS if all(name in env for name in row.marks.split()))
    if row.platform == "pbs":
        node = _pbs(env, hostname or socket.gethostname(), read_text or (lambda path: Path(path).read_text()))
    else:
        node = _from_variables(row, env)
    if not 0 <= node.rank < node.nodes:
        raise ConfigError(
            f"{node.platform}: node rank {node.rank} of {node.nodes} nodes: "
            f"ranks go from 0 to {node.nodes - 1}"
        )
    return node


def _from_variables(row: PlatformVariables, env: Mapping[str, str]) -> NodeEnvironment:
    peers = split_list(_first_set(env, row.peers))
    one_node = row.platform in ("spotrl", "slurm", "local")  # where nothing tells their number
    nodes = _int(env, row.nodes, default=len(peers) or (1 if one_node else None))
    rank = _int(env, row.rank, default=0 if nodes == 1 else None)
    if row.platform == "slurm":
        _check_slurm_step(env, nodes)
        names = expand_hostlist(_first_set(env, row.peers) or "127.0.0.1")
        peers = names if nodes > 1 else names[:1]
    if row.platform == "torchrun" and (env.get("LOCAL_RANK", "0"), env.get("LOCAL_WORLD_SIZE", "1")) != (
        "0",
        "1",
    ):
        raise ConfigError("torchrun started more than one launcher on this node: use --nproc-per-node=1")
    return _node(
        row.platform, rank, nodes, peers, _gpus(_first_set(env, row.gpus)), _first_set(env, row.head)
    )


def _node(
    platform: Platform, rank: int, nodes: int, peers: tuple[str, ...], gpus: int | None, head: str = ""
) -> NodeEnvironment:
    if peers and len(peers) != nodes:
        raise ConfigError(f"{platform}: {nodes} nodes, but {len(peers)} addresses: {', '.join(peers)}")
    head = head or (peers[0] if peers else "127.0.0.1" if nodes == 1 else "")
    if not head:
        raise ConfigError(f"{platform}: {nodes} nodes and no head: give its address in SPOTRL_HEAD")
    peers = peers or ((head,) if nodes == 1 else ())
    return NodeEnvironment(
        platform=platform, rank=rank, nodes=nodes, head=head, peers=peers, gpus_per_node=gpus
    )


def _check_slurm_step(env: Mapping[str, str], nodes: int) -> None:
    if nodes > 1 and "SLURM_STEP_NUM_NODES" not in env:
        raise ConfigError(
            f"this Slurm job has {nodes} nodes, but the launcher was not started by srun: "
            "use `srun --ntasks-per-node=1 python -m trainer.node ...`"
        )
    if env.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError("srun started more than one launcher on this node: use --ntasks-per-node=1")


def start_names(env: Mapping[str, str]) -> dict[str, str]:
    """What names this start of the job: a node that an earlier start left over has another value."""
    return {name: env[name] for name in START_VARIABLES if env.get(name)}


def _pbs(env: Mapping[str, str], hostname: str, read_text: Callable[[str], str]) -> NodeEnvironment:
    try:
        hosts = tuple(dict.fromkeys(read_text(env["PBS_NODEFILE"]).split()))
    except OSError:
        raise ConfigError(
            f"PBS_NODEFILE names {env['PBS_NODEFILE']}, which cannot be read: set SPOTRL_PEERS"
        ) from None
    if not hosts:
        raise ConfigError(f"PBS_NODEFILE {env['PBS_NODEFILE']} is empty: set SPOTRL_PEERS")
    short = list(map(_first_label, hosts))
    if _first_label(hostname) in short:
        rank = short.index(_first_label(hostname))
    elif len(hosts) == 1:
        rank = 0
    else:
        rank = _int(env, "PBS_NODENUM PBS_VNODENUM")

    gpus_here = 0
    if "PBS_GPUFILE" in env:  # Torque: one line per GPU, "host-gpuN"
        for line in read_text(env["PBS_GPUFILE"]).split():
            host = re.sub(r"-gpu\d+$", "", line)
            gpus_here += _first_label(host) == short[rank]
    gpus = gpus_here or _gpus(env.get("SPOTRL_GPUS_PER_NODE"))
    return _node("pbs", rank, len(hosts), hosts, gpus)


def _first_label(host: str) -> str:
    """The name of a machine without its domain."""
    return host.partition(".")[0]


def _first_set(env: Mapping[str, str], names: str) -> str:
    return next(filter(None, map(env.get, names.split())), "")


def _int(env: Mapping[str, str], names: str, default: int | None = None) -> int:
    """The first of the variables that is set; without a default one of them must be."""
    text = _first_set(env, names)
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d+", text):
        known = names.replace(" ", " or ")
        name = next(filter(env.get, names.split()), "")
        raise ConfigError(f"{name} is {text!r}: it must be a number" if text else f"{known} is missing")
    return int(text)


def _gpus(text: str | None) -> int | None:
    """GPUs from "8", "a100:8" or "a100:4,h100:4"; None if empty."""
    if not text:
        return None
    gpus = 0
    for part in text.split(","):
        count = part.rpartition(":")[2].partition("(")[0]
        if not count.isdigit():
            raise ConfigError(f"GPUs per node {text!r}: expected a number; set SPOTRL_GPUS_PER_NODE")
        gpus += int(count)
    return gpus


def split_list(text: str) -> tuple[str, ...]:
    """Items separated by commas, blanks or newlines."""
    return tuple(filter(None, re.split(r"[\s,]+", text)))


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Slurm's short form: gpu[01-03,7],login -> gpu01 gpu02 gpu03 gpu7 login."""
    items: list[str] = []
    depth = 0
    item = ""
    for char in text + ",":
        if char == "," and depth == 0:
            items.append(item)
            item = ""
            continue
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        item += char
    names = []
    for item in filter(None, items):
        names += _expand(item)
    return tuple(names)


def _expand(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if not match:
        return [item]
    names = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            names += _expand(f"{item[: match.start()]}{number:0{len(low)}d}{item[match.end() :]}")
    return names
