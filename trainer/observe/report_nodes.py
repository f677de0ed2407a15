"""The part of a report that shows the machines: what each node did, and which rank the others waited for, per
phase."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from trainer.observe.history import SLOWED, STRAGGLES, column
from trainer.observe.report_page import table_cells

GIB = 2**30
MAX_RANKS = 64

Waits = dict[str, dict[int, float]]
"""Phase -> rank -> share of the phase's time that the rank waited in collectives."""


def nodes_section(samples: Sequence[dict[str, Any]]) -> str:
    """Tables of nodes and of ranks; "" without samples."""
    if not samples:
        return ""
    by_node: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_node.setdefault(sample["node"], []).append(sample)

    columns = ["node", "GPUs busy", "GPU memory, peak", "hottest", "power", "slowed down", "CPU"]
    columns += ["memory, peak", "disk free, least", "network in", "out", "InfiniBand in", "out"]
    rows = []
    for node in sorted(by_node):
        rows.append([str(node), *_of_node(by_node[node])])

    shown = f'<h2>Machines</h2><section class="phases">{_table(columns, rows)}'
    return shown + _ranks(waits_by_phase(samples)) + "</section>"


def _of_node(samples: Sequence[dict[str, Any]]) -> list[str]:
    gpus = []
    for of_one_sample in column(samples, "gpus"):
        gpus += of_one_sample
    rates = column(samples, "bytes_per_s")

    of_gpus = ["–"] * 5
    if gpus:
        slowed = sum(bool(g.get("slowdown", 0) & SLOWED) for g in gpus)
        busy = statistics.mean(column(gpus, "busy_fraction"))
        memory_gib = max(column(gpus, "memory_bytes")) / GIB
        power_w = statistics.mean(column(gpus, "power_w"))
        of_gpus = [
            f"{busy:.0%}",
            f"{memory_gib:.1f} GiB",
            f"{max(column(gpus, 'temperature_c'))} °C",
            f"{power_w:.0f} W",
            f"{slowed / len(gpus):.0%} of samples" if slowed else "never",
        ]
    return [
        *of_gpus,
        _over(samples, "cpu_fraction", statistics.mean, "{:.0%}"),
        _over(samples, "memory_fraction", max, "{:.0%}"),
        _over(samples, "disk_free_bytes", min, "{:.0f} GiB", GIB),
        _over(rates, "network_in", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "network_out", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "infiniband_in", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "infiniband_out", statistics.mean, "{:,.0f} MB/s", 1e6),
    ]


def _over(
    samples: Sequence[dict[str, Any]],
    name: str,
    of: Callable[[list[float]], float],
    form: str,
    unit: float = 1.0,
) -> str:
    values = column(samples, name)
    return form.format(of(values) / unit) if values else "–"


def waits_by_phase(samples: Sequence[dict[str, Any]]) -> Waits:
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
        shares[phase] = {}
        for rank, total in sorted(by_rank.items()):
            if total > 0:
                shares[phase][rank] = waited[phase][rank] / total
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
    ranks = sorted(set().union(*shares.values()))
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
    head = ("rank", *[phase or "all" for phase in shares], "")
    return f"<h3>Time waited in collectives, by phase and rank</h3>{_table(head, rows)}{more}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = ""
    for row in rows:
        body += f"<tr>{table_cells(row)}</tr>"
    head = table_cells(columns, "th")
    return f"<table class=wide><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
