"""The part of a report that shows the machines: what each node did, and which rank the others waited for, per
phase."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from trainer.observe.history import SLOWED, STRAGGLES

GIB = 2**30
MAX_RANKS = 64

Waits = dict[str, dict[int, float]]
"""Phase -> rank -> share of the phase's time that the rank waited in collectives."""


def section(samples: Sequence[dict[str, Any]]) -> str:
    """Tables of nodes and of ranks; "" without samples."""
    if not samples:
        return ""
    nodes = sorted({s["node"] for s in samples})
    columns = ["node", "GPUs busy", "GPU memory, peak", "hottest", "power", "slowed down", "CPU"]
    columns += ["memory, peak", "disk free, least", "network in", "out", "InfiniBand in", "out"]
    rows = []
    for n in nodes:
        rows.append([str(n), *_of_node([s for s in samples if s["node"] == n])])

    shown = f'<h2>Machines</h2><section class="phases">{_table(columns, rows)}'
    return shown + _ranks(waits(samples)) + "</section>"


def _of_node(samples: Sequence[dict[str, Any]]) -> list[str]:
    gpus = []
    for s in samples:
        gpus += s.get("gpus", [])

    def rate(name: str) -> str:
        values = []
        for s in samples:
            if name in s.get("bytes_per_s", {}):
                values.append(s["bytes_per_s"][name])

        return f"{statistics.mean(values) / 1e6:,.0f} MB/s" if values else "–"

    of_gpus = ["–"] * 5
    if gpus:
        slowed = sum(bool(g.get("slowdown", 0) & SLOWED) for g in gpus)
        busy = statistics.mean([g["busy_fraction"] for g in gpus])
        power_w = statistics.mean([g["power_w"] for g in gpus])
        of_gpus = [
            f"{busy:.0%}",
            f"{max(g['memory_bytes'] for g in gpus) / GIB:.1f} GiB",
            f"{max(g['temperature_c'] for g in gpus)} °C",
            f"{power_w:.0f} W",
            f"{slowed / len(gpus):.0%} of samples" if slowed else "never",
        ]
    return [
        *of_gpus,
        _over(samples, "cpu_fraction", statistics.mean, "{:.0%}"),
        _over(samples, "memory_fraction", max, "{:.0%}"),
        _over(samples, "disk_free_bytes", min, "{:.0f} GiB", GIB),
        *(rate(f"{fabric}_{way}") for fabric in ("network", "infiniband") for way in ("in", "out")),
    ]


def _over(
    samples: Sequence[dict[str, Any]],
    name: str,
    of: Callable[[list[float]], float],
    form: str,
    unit: float = 1.0,
) -> str:
    values = [s[name] / unit for s in samples if name in s]
    return form.format(of(values)) if values else "–"


def waits(samples: Sequence[dict[str, Any]]) -> Waits:
    """Share of each phase that each rank waited in collectives: a straggler waits least, since the others
    wait for it.

    The time between two samples of a node counts for the phase of the later one, where both name the same
    step's phase.
    """
    seconds: dict[str, dict[int, float]] = {}
    waited: dict[str, dict[int, float]] = {}
    last: dict[int, tuple[float, float, str]] = {}
    for sample in sorted(samples, key=lambda s: s["unix_s"]):
        phase = sample.get("phase", "")
        for name, (_, wait) in sample.get("ranks", {}).items():
            rank, at = int(name), sample["unix_s"]
            before = last.get(rank)
            last[rank] = (at, wait, phase)
            if before is None or before[2] != phase or wait < before[1]:  # the latter: started again
                continue
            for table, value in ((seconds, at - before[0]), (waited, wait - before[1])):
                table.setdefault(phase, {}).setdefault(rank, 0.0)
                table[phase][rank] += value
    shares: Waits = {}
    for phase, by_rank in sorted(seconds.items(), key=lambda p: -sum(p[1].values())):
        shares[phase] = {rank: waited[phase][rank] / s for rank, s in sorted(by_rank.items()) if s > 0}
    return shares


def stragglers(shares: dict[int, float]) -> list[int]:
    """Ranks that wait for much less of the time than the median of the others."""
    if len(shares) < 2:
        return []
    late = []
    for rank, share in shares.items():
        others = [value for other, value in shares.items() if other != rank]
        if statistics.median(others) - share >= STRAGGLES:
            late.append(rank)
    return late


def _ranks(shares: Waits) -> str:
    ranks = sorted({rank for of in shares.values() for rank in of})
    if len(ranks) < 2:
        return ""
    rows = []
    for rank in ranks[:MAX_RANKS]:
        keeps = []
        for phase, of in shares.items():
            if rank in stragglers(of):
                keeps.append(phase or "all")

        cells = []
        for of in shares.values():
            cells.append(f"{of[rank]:.0%}" if rank in of else "–")

        rows.append([str(rank), *cells, f"keeps the others waiting: {', '.join(keeps)}" if keeps else ""])
    more = f"<p>{len(ranks) - MAX_RANKS} more ranks.</p>" if len(ranks) > MAX_RANKS else ""
    head = ("rank", *(phase or "all" for phase in shares), "")
    return f"<h3>Time waited in collectives, by phase and rank</h3>{_table(head, rows)}{more}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table class=wide><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
