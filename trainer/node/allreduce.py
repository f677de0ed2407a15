"""All-reduce between all ranks for a while, every sum checked: `python -m trainer.node.allreduce`, under torchrun.

Bus bandwidth as NCCL's tests define it: bytes / time * 2 (n - 1) / n, comparable with the link's own speed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time

DEADLINE_S = 60.0
"""Longest wait for the other ranks, and for any one all-reduce."""


def command(
    python: str, seconds: float, device: str, rank: int, nodes: int, ranks_per_node: int, head: str, port: int
) -> list[str]:
    """What a node starts: torchrun with one process per rank."""
    return [
        python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={rank}",
        f"--nproc-per-node={ranks_per_node}", f"--master-addr={head}", f"--master-port={port}",
        "--max-restarts=0", "-m", "trainer.node.allreduce", f"--seconds={seconds}", f"--device={device}",
    ]  # fmt: skip


def main() -> int:
    """One rank. Rank 0 prints one line per size; 1 if a sum was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    import torch
    import torch.distributed as dist

    cuda = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [1 << 20, 1 << 25, 1 << 28, 1 << 30] if cuda else [1 << 16, 1 << 20, 1 << 24]  # bytes
    wrong = False
    for size in sizes:
        data = torch.empty(size // 4, device=device)
        began, rounds, spent = time.monotonic(), 0, 0.0
        going = torch.ones(1, device=device)
        while going.item():
            data.fill_(float(rank + 1))
            if cuda:
                torch.cuda.synchronize()
            start = time.monotonic()
            dist.all_reduce(data)
            if cuda:
                torch.cuda.synchronize()
            spent += time.monotonic() - start
            rounds += 1
            wrong |= bool((data != world * (world + 1) / 2).any())
            going[0] = float(time.monotonic() - began < arguments.seconds / len(sizes))
            dist.all_reduce(going, dist.ReduceOp.MIN)  # all ranks leave the loop together
        if rank == 0:
            bus = size * rounds / spent * 2 * (world - 1) / world / 1e9
            took_ms = 1e3 * spent / rounds
            print(
                f"all-reduce of {size >> 10} KiB over {world} ranks: {took_ms:.2f} ms, {bus:.2f} GB/s bus", flush=True
            )
    flag = torch.tensor([float(wrong)], device=device)
    dist.all_reduce(flag)
    dist.destroy_process_group()
    if flag.item() and rank == 0:
        print(
            "error: sums came back wrong: a GPU or a link corrupts data; do not train on these nodes", file=sys.stderr
        )
    return int(bool(flag.item()))


if __name__ == "__main__":
    sys.exit(main())
