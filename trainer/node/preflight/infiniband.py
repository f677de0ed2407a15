"""InfiniBand and RoCE devices as the kernel shows them, and which of them NCCL is to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.node.preflight.findings import Finding, judged

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Port:
    """One port of a device."""

    device: str
    number: int
    active: bool
    gbit_per_s: float
    ethernet: bool
    """RoCE in place of InfiniBand."""


def infiniband_ports(root: Path = SYSFS) -> list[Port]:
    """Every port, [] where there is no such device."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        state = _text(folder / "state")
        rate = _text(folder / "rate")
        ethernet = _text(folder / "link_layer") == "Ethernet"
        speed = float(rate.split()[0]) if rate else 0.0
        ports.append(Port(folder.parts[-3], int(folder.name), "ACTIVE" in state, speed, ethernet))
    return ports


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def fastest_ports(ports: list[Port]) -> list[Port]:
    """The active ports that share the highest rate: those that carry the collectives."""
    rate = max((p.gbit_per_s for p in ports if p.active), default=0.0)
    return [p for p in ports if p.active and p.gbit_per_s == rate]


def used_gbit_per_s(env: Mapping[str, str]) -> float:
    """What NCCL may use of this node's InfiniBand or RoCE; 0 for none."""
    if env.get("NCCL_IB_DISABLE") == "1":
        return 0.0
    return sum(port.gbit_per_s for port in fastest_ports(infiniband_ports()))


def nccl_variables(ports: list[Port], env: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Variables for NCCL, and why; none where it would choose the same, or the variable is set."""
    used = fastest_ports(ports)
    if len(used) == len(ports) or "NCCL_IB_HCA" in env or not used:
        return {}, ""
    left = [port.device for port in ports if port not in used]
    value = "=" + ",".join(f"{port.device}:{port.number}" for port in used)
    why = f"NCCL_IB_HCA={value}: {', '.join(left)} is down or slower, and NCCL would use it, too"
    return {"NCCL_IB_HCA": value}, why


def judge_infiniband(nodes: Mapping[int, list[dict[str, Any]]]) -> list[Finding]:
    """Findings over all nodes, of the ports as dictionaries: a node with less than the others is named."""
    rates: dict[int, float] = {}
    for rank, ports in nodes.items():
        rates[rank] = sum(port.gbit_per_s for port in fastest_ports([Port(**port) for port in ports]))
    best = max(rates.values(), default=0.0)
    out = []
    for rank, rate in rates.items():
        down = [p["device"] for p in nodes[rank] if not p["active"]]
        if rate < best:
            why = f" ({', '.join(down)} down)" if down else ""
            figure = f"{rate:.0f} Gb/s of InfiniBand or RoCE{why}, another node has {best:.0f}"
            out.append(judged("InfiniBand", (rank,), figure))
        elif best:
            out.append(judged("InfiniBand", (rank,), "", f"{rate:.0f} Gb/s"))
    return out
