"""Speed of every GPU and of collectives, every sum checked: `python -m trainer.node.preflight.speed`, under
torchrun.

Matrix product and memory bandwidth per GPU, then all-reduce within each node and between all. Bus bandwidth
as NCCL's tests define it: bytes / time * 2 (n - 1) / n, comparable with the link's own speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.node.preflight import thresholds
from trainer.node.preflight.findings import Finding, judged

DEADLINE_S = 60.0
"""Longest wait for the other ranks, and for any one all-reduce."""
WARM_S = 0.5
"""An idle GPU takes some tenths of a second to its full clocks, else good ones would differ by 10%."""
SHORT_ROUNDS = 4
"""All-reduces of a start, of which the first sets the connections up."""
BETWEEN = "all-reduce between nodes"
"""The check's name."""
MATRIX = 8192
"""Side of the square bf16 matrices that are multiplied on a GPU."""


def speed_command(
    seconds: float, device: str, rank: int, nodes: int, ranks_per_node: int, head: str, port: int, out: str
) -> list[str]:
    """What a node starts: torchrun with one process per rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={rank}"]
    torchrun += [f"--nproc-per-node={ranks_per_node}", "--max-restarts=0"]
    torchrun += [f"--master-addr={head}", f"--master-port={port}"]
    program = ["-m", "trainer.node.preflight.speed", f"--seconds={seconds}", f"--device={device}"]
    return [*torchrun, *program, f"--out={out}"]


def main() -> int:
    """One rank. Rank 0 prints one line per size and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="", help="file for what was measured, written by rank 0")
    arguments = parser.parse_args()
    import torch
    import torch.distributed as dist

    cuda = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    rank = dist.get_rank()
    world = dist.get_world_size()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    measured: dict[str, Any] = {
        "node": rank // local,
        "rank": rank,
        "gpu": torch.cuda.get_device_name(device) if cuda else "",
    }
    quick = not arguments.seconds
    if cuda and not quick:
        measured |= {"tflops": _matmul_tflops(device), "memory_gb_per_s": _memory_gb_per_s(device)}
    groups = []
    for first in range(0, world, local):
        groups.append(dist.new_group(list(range(first, first + local))))

    inside = 0.0
    wrong = False
    if 1 < local < world and not quick:
        inside, wrong = _reduce(device, groups[rank // local], arguments.seconds / 4, show=False)
    between, wrong_too = _reduce(device, dist.group.WORLD, arguments.seconds, show=rank == 0)
    measured |= {"between_gb_per_s": between, "wrong": wrong, "wrong_between": wrong_too}
    if not quick:
        measured["inside_gb_per_s"] = between if local == world else inside
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, measured)
    dist.destroy_process_group()
    if rank == 0 and arguments.out:
        Path(arguments.out).write_text(json.dumps(everyone))
    return 0


def _reduce(device: Any, group: Any, seconds: float, show: bool) -> tuple[float, bool]:
    """(best bus bandwidth over the sizes in GB/s, whether any sum was wrong) of all-reduces for a while."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    world = dist.get_world_size(group)
    best = 0.0
    wrong = False
    total = world * (world + 1) / 2
    sizes = [1 << 20, 1 << 25, 1 << 28, 1 << 30] if cuda else [1 << 16, 1 << 20, 1 << 24]  # bytes
    least = 2
    if not seconds:
        sizes = sizes[2:3]
        least = SHORT_ROUNDS
    for size in sizes:
        data = torch.empty(size // 4, device=device)
        began = time.monotonic()
        rounds = 0
        spent = 0.0
        going = torch.ones(1, device=device)
        while going.item():
            data.fill_(float(dist.get_rank(group) + 1))
            if cuda:
                torch.cuda.synchronize()
            start = time.monotonic()
            dist.all_reduce(data, group=group)
            if cuda:
                torch.cuda.synchronize()
            if rounds or world == 1:  # the first one sets the connections up
                spent += time.monotonic() - start
            rounds += 1
            wrong |= bool((data != total).any())
            in_time = time.monotonic() - began < seconds / len(sizes)
            going[0] = float(rounds < least or in_time)
            dist.all_reduce(going, dist.ReduceOp.MIN, group=group)  # all ranks leave the loop together
        bus = size * (rounds - 1) / spent * 2 * (world - 1) / world / 1e9
        best = max(best, bus)
        if show:
            took_ms = 1e3 * spent / (rounds - 1)
            print(
                f"all-reduce of {size >> 10} KiB over {world} ranks: {took_ms:.2f} ms, {bus:.2f} GB/s bus",
                flush=True,
            )
    return best, wrong


def _timed(work: Any, times: int) -> float:
    """Seconds per call on the GPU, the best of five rounds after it has left its idle clocks."""
    import torch

    def one_round() -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return (time.monotonic() - began) / times

    warm = time.monotonic() + WARM_S
    while time.monotonic() < warm:
        one_round()
    return min(one_round() for _ in range(5))


def _matmul_tflops(device: Any) -> float:
    import torch

    a = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    b = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    return 2 * MATRIX**3 / _timed(lambda: torch.mm(a, b), 30) / 1e12


def _memory_gb_per_s(device: Any) -> float:
    """Memory bandwidth of a copy, which reads and writes."""
    import torch

    source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    copy = torch.empty_like(source)
    return 2 * source.numel() / _timed(lambda: copy.copy_(source), 30) / 1e9


# --- checks ---------------------------------------------------------------------------------------------


def judge_speed(ranks: list[dict[str, Any]], fabric_gbit_per_s: float) -> list[Finding]:
    """Findings on what the ranks measured. fabric_gbit_per_s: of a node's InfiniBand or RoCE; 0: none."""
    out = []
    rates = (("matrix product", "tflops", "TFLOP/s"), ("GPU memory", "memory_gb_per_s", "GB/s"))
    for check, key, unit in rates:
        values = [r[key] for r in ranks if key in r]
        if not values:
            continue
        median = statistics.median(values)
        slow = [r for r in ranks if r[key] < (1 - thresholds.GPU_SPREAD) * median]
        for r in slow:
            figure = f"GPU of rank {r['rank']} reaches {r[key]:.0f} {unit}, the median is {median:.0f}"
            out.append(judged(check, (r["node"],), figure))
        if not slow:
            out.append(judged(check, (), "", f"{min(values):.0f} to {max(values):.0f} {unit}"))
    by_node: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        by_node.setdefault(rank["node"], []).append(rank)
    out += _sums(ranks, by_node)
    inside = []
    for node in sorted(by_node):
        inside += _inside(node, by_node[node])
    if len(inside) > 1 and all(finding.level == "fail" for finding in inside):  # what all nodes share
        inside = [replace(finding, machine=False) for finding in inside]
    out += inside
    if len(by_node) > 1:
        out.append(_between(min(rank["between_gb_per_s"] for rank in ranks), fabric_gbit_per_s))
    return out


def _sums(ranks: list[dict[str, Any]], by_node: Mapping[int, list[dict[str, Any]]]) -> list[Finding]:
    """A node whose own ranks add up wrongly is named; else it is some link between them."""
    guilty = [(node,) for node, own in by_node.items() if any(rank.get("wrong") for rank in own)]
    if not guilty and any(rank.get("wrong_between") for rank in ranks):
        guilty = [()] if len(by_node) > 1 else [(0,)]
    figure = "sums came back wrong: a GPU or a link corrupts data"
    return [judged("sums", nodes, figure) for nodes in guilty]


def _inside(node: int, ranks: list[dict[str, Any]]) -> list[Finding]:
    model = ranks[0]["gpu"].upper()
    bridged = "PCIE" in model or "NVL" in model.split()  # at most pairs of these are linked
    kind = next((k for k in thresholds.NVLINK_GB_PER_S if k in model), "")
    if not kind or bridged or len(ranks) < 2 or "inside_gb_per_s" not in ranks[0]:
        return []
    both_ways, source = thresholds.NVLINK_GB_PER_S[kind]
    limit = both_ways / 2
    bus = min(r["inside_gb_per_s"] for r in ranks)
    # Half of it is out of reach only where NVLink is down or NCCL took another way.
    level = "fail" if bus < limit / 2 else "warn"
    wrong = f"all-reduce within the node reaches {bus:.0f} GB/s" if bus < limit else ""
    target = f"{limit:.0f} GB/s ({source})"
    return [judged("all-reduce in the node", (node,), wrong, f"{bus:.0f} GB/s", target, level=level)]


def _between(bus: float, fabric_gbit_per_s: float) -> Finding:
    if not fabric_gbit_per_s:
        return judged(BETWEEN, (), "", f"{bus:.2f} GB/s")
    limit = thresholds.FABRIC_SHARE * fabric_gbit_per_s / 8
    share = f"{thresholds.FABRIC_SHARE:.0%} of {fabric_gbit_per_s:.0f} Gb/s"
    target = f"{limit:.0f} GB/s: {share} ({thresholds.TOGETHER})"
    wrong = f"all-reduce between all nodes reaches {bus:.0f} GB/s" if bus < limit else ""
    level = "fail" if bus < limit / 4 else "warn"
    return judged(BETWEEN, (), wrong, f"{bus:.0f} GB/s", target, level=level)


if __name__ == "__main__":
    sys.exit(main())
