"""What the preflight found: one line per finding, one table on the screen, one JSON file, one exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainer.config.run_folder import write_whole
from trainer.node.preflight import thresholds
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_PREFLIGHT

Level = Literal["pass", "warn", "fail"]
FILE = "preflight.json"
ORDER: dict[Level, int] = {"fail": 0, "warn": 1, "pass": 2}
ANOTHER_MACHINE_HELPS = {
    "GPUs": "a GPU has dropped out, or the driver has stopped",
    "GPU model": "its GPUs are not alike, or not the other nodes'",
    "driver": "hosts of one offer have different drivers",
    "ECC": "this GPU's memory is faulty",
    "NVLink": "links of this board are down",
    "clocks": "power or cooling of this machine",
    "kernel log": "a GPU of this machine has reported an error of its hardware",
    "matrix product": "this GPU is slower than the job's others",
    "GPU memory": "this GPU is slower than the job's others",
    "all-reduce in the node": "links of this board, unless all nodes are slow",
    "sums": "a GPU or a link of it corrupts data",
    "InfiniBand": "its port is down or slower than another node's",
    "ports": "its host's firewall, unless no pair of nodes gets through",
    "MTU": "its port of the network, unless no pair of nodes gets through",
    "loss": "its cable or switch port",
    "bandwidth": "its cable or switch port, where other pairs are faster",
    "the head's port": "it is up and cannot connect there, and others do",
    "the first long message": "it does not arrive from there, and others' do",
    "transfer through Ray": "some pairs of nodes exchange data, its own do not",
    "clock": "a host sets the clock of its containers",
}
"""Why another machine helps, by check. The cause of any other check the next machine shares."""
ANOTHER = "take another machine"
DISKS = "run.dir, HF_HOME or SPOTRL_TMP"
PORTS = "open all TCP between the nodes (security group, firewall)"
TARGETS_AND_REMEDIES = {
    "GPUs": (
        "every GPU answers",
        "give the machine back: a GPU fell off its bus (Xid 79), or the driver broke",
    ),
    "GPU model": ("all alike", "take nodes with one kind of GPU: the slowest sets the pace"),
    "driver": ("alike on all nodes", "take nodes of one image"),
    "ECC": ("no uncorrectable error", ANOTHER),
    "row remapping": ("", "restart the machine or take another"),
    "NVLink": ("all up, or no bridge", ANOTHER),
    "PCIe": ("its full width, all alike", ANOTHER),
    "clocks": ("no slowdown", f"power or cooling: {ANOTHER}"),
    "temperature": (f"{thresholds.GPU_TEMPERATURE_MARGIN_C:.0f} C below slowdown", f"cooling: {ANOTHER}"),
    "processes on the GPU": ("none", "end them (nvidia-smi), or take a machine of your own"),
    "kernel log": ("", "a GPU of this machine is failing: take another"),
    "matrix product": (thresholds.SPREAD_TARGET, f"clocks, power or cooling of this GPU: {ANOTHER}"),
    "GPU memory": (thresholds.SPREAD_TARGET, f"clocks, power or cooling of this GPU: {ANOTHER}"),
    "all-reduce in the node": (
        "",
        "nvidia-smi nvlink -s and topo -m show which link is down; NCCL_DEBUG=INFO which way NCCL took",
    ),
    "all-reduce between nodes": (
        "no InfiniBand or RoCE",
        "NCCL_DEBUG=INFO must show NET/IB or the provider's plugin, not NET/Socket",
    ),
    "sums": ("", "do not train on these nodes: take other machines"),
    "shared memory": ("", "start the container with a larger --shm-size (Kubernetes: an emptyDir in memory)"),
    "memory": ("", "use larger nodes, or fewer placement.workers_per_node"),
    "loopback": ("", "ip link set lo up"),
    "pinned memory": (str(1 << 40), "docker: --ulimit memlock=-1:-1"),
    "processors": ("", "ask for more CPUs (cluster.cpus), or raise the container's CPU quota"),
    "compiler": (
        "a C compiler and Python.h",
        "install gcc and python3-dev (dnf: gcc python3-devel), load the site's compiler module in"
        " site.prelude, or set CC",
    ),
    "disk space": ("", f"free some, lower checkpoint.keep_last, or set {DISKS} to a larger disk"),
    "local disk": ("", "set SPOTRL_TMP to a local disk"),
    "disk speed": ("", f"set {DISKS} to a faster, local disk"),
    "files": ("", "copy it to every node, or give a URL"),
    "tokens": ("accepted", "make a new token and export it"),
    "packages": ("", "run trainer/shell/setup.sh of the same commit on every node"),
    "code": ("", "copy the same commit to every node"),
    "configuration": ("", "start all nodes with one run.yaml"),
    "data": ("", "prepare or copy the same dataset on every node (launch.py data verify)"),
    "InfiniBand": ("", f"ibstat shows the port; {ANOTHER}"),
    "interface": ("one network, shared by all nodes", "set it on no node, or alike"),
    "host name": ("it resolves, and to this node", "correct /etc/hosts or DNS there"),
    "address": ("one node each", "give each node its own"),
    "ports": ("every port of every node, both ways", PORTS),
    "MTU": ("alike on all nodes, and it carries", "lower the interfaces' MTU to what the network carries"),
    "clock": (f"{thresholds.CLOCK_WARN_S} s", "start NTP (chronyd) on both"),
    "round trip": (f"{thresholds.ROUND_TRIP_WARN_MS} ms", "are the nodes in one zone, and on one network?"),
    "loss": (f"< {thresholds.LOSS_WARN:.1%}", f"a cable, a port or a congested switch: {ANOTHER}"),
    "bandwidth": (
        f"{thresholds.SLOW_PAIR_WARN:.0%} of the other pairs",
        f"{ANOTHER}, or look at its cable, switch port and virtual network card",
    ),
}
"""The target and the remedy of each check, where its measurement does not say another."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measurement and its limit."""

    check: str
    """The check's name, such as `disk` or `bandwidth`."""
    nodes: tuple[int, ...] = ()
    """Ranks: none for the whole job, one for a node, two for a pair (from the first to the second)."""
    level: Level = "pass"
    figure: str
    """What was measured; for a failure, a sentence that states the problem."""
    target: str = ""
    """The limit."""
    remedy: str = ""
    """What to change. Every warning and failure has one."""
    machine: bool = True
    """Another machine would fix it (exit code 36); else only the user can (exit code 2). Never true of a
    check that is not in `ANOTHER_MACHINE_HELPS`."""

    def __post_init__(self) -> None:
        if self.check not in ANOTHER_MACHINE_HELPS:
            object.__setattr__(self, "machine", False)

    def line(self, name_of: Callable[[int], str]) -> str:
        """The finding in one line; `name_of` gives "" where there is one node only."""
        where = " -> ".join(filter(None, map(name_of, self.nodes)))
        return f"{where + ': ' if where else ''}{self.figure}" + (f": {self.remedy}" if self.remedy else "")


def judged(
    check: str,
    nodes: Iterable[int],
    wrong: str,
    figure: str = "",
    target: str = "",
    remedy: str = "",
    level: Level = "fail",
    machine: bool = True,
) -> Finding:
    """A finding that passes where nothing is wrong. wrong: what is, in words; figure: what a pass shows;
    target, remedy: of TARGETS_AND_REMEDIES where they are empty."""
    usual_target, usual_remedy = TARGETS_AND_REMEDIES.get(check, ("", ""))
    passed = Finding(check=check, nodes=tuple(nodes), figure=figure, target=target or usual_target)
    if not wrong:
        return passed
    return replace(passed, level=level, figure=wrong, remedy=remedy or usual_remedy, machine=machine)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if nothing failed, 36 if another machine would fix any failure, 2 if only the user can."""
    code = EXIT_OK
    for finding in findings:
        if finding.level == "fail" and finding.machine:
            return EXIT_PREFLIGHT
        if finding.level == "fail":
            code = EXIT_CONFIG
    return code


def finding_lines(findings: Iterable[Finding], name_of: Callable[[int], str]) -> list[str]:
    """Every warning and failure in one line."""
    words = {"warn": "warning", "fail": "error"}
    return [f"{words[f.level]}: {f.line(name_of)}" for f in findings if f.level in words]


def failed_machines(findings: Iterable[Finding]) -> list[int]:
    """Ranks of the nodes whose own machine failed a check. A failed pair does not say which it is."""
    ranks = set()
    for finding in findings:
        if finding.level == "fail" and finding.machine and len(finding.nodes) == 1:
            ranks.add(finding.nodes[0])
    return sorted(ranks)


def findings_table(findings: Sequence[Finding], name_of: Callable[[int], str]) -> str:
    """All findings: what is wrong first, then one row for every check that nodes passed."""
    rows = [("", "check", "where", "measured", "target")]
    for finding in sorted(findings, key=lambda f: ORDER[f.level]):
        if finding.level != "pass":
            where = " -> ".join(map(name_of, finding.nodes)) or "all nodes"
            rows.append((finding.level, finding.check, where, finding.figure, finding.target))
    passed: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.level == "pass":
            passed.setdefault(finding.check, []).append(finding)
    for check, group in passed.items():
        figures = list(dict.fromkeys(finding.figure for finding in group))
        nodes = sorted({rank for finding in group for rank in finding.nodes})
        figure = ", ".join(figures[:2]) + (f" and {len(figures) - 2} more" if len(figures) > 2 else "")
        where = f"{len(nodes)} nodes" if len(nodes) > 1 else name_of(nodes[0]) if nodes else "all nodes"
        rows.append(("pass", check, where, figure, group[0].target))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join(map(str.ljust, row, [*widths, 0])).rstrip() for row in rows)


def write_findings(findings: Sequence[Finding], measured: dict[str, Any], run_dir: str | Path) -> Path:
    """Writes everything that was found and measured to `preflight.json` of the run's folder."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"unix_s": time.time(), "code": exit_code(findings), "findings": list(map(asdict, findings))}
    path = folder / FILE
    write_whole(path, f"{json.dumps(content | measured, indent=1)}\n".encode())
    return path


def finding_from_message(message: dict[str, Any]) -> Finding:
    """A finding from another node's JSON."""
    return replace(Finding(**message), nodes=tuple(message["nodes"]))
