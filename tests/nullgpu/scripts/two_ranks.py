"""Two ranks exchange real data through NCCL. With "unequal" rank 1 asks for another collective."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SUMMED = (torch.float32, torch.bfloat16, torch.int64)
LONG = 1_000_003  # longer than a slot of shared memory, and odd


def rank(number: int, port: int, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE="2")
    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    dist.init_process_group("nccl", device_id=device)

    def filled(value: float, length: int, dtype=torch.float32):
        return torch.full((length,), value, dtype=dtype).to(device)

    if how == "unequal":
        dist.all_reduce(filled(1, 10 + number))
        return
    for dtype in SUMMED:
        one = filled(number + 1, LONG, dtype)
        dist.all_reduce(one)
        assert (one.cpu() == 3).all(), dtype
    gathered = torch.empty(2 * LONG, device=device)
    dist.all_gather_into_tensor(gathered, filled(number, LONG))
    assert torch.equal(gathered.cpu(), torch.arange(2.0).repeat_interleave(LONG))
    shared = torch.arange(2 * LONG, dtype=torch.float64)
    mine = torch.empty(LONG, dtype=torch.float64, device=device)
    dist.reduce_scatter_tensor(mine, shared.to(device))
    assert torch.equal(mine.cpu(), 2 * shared[number * LONG : (number + 1) * LONG])
    told = filled(number, 10)
    dist.broadcast(told, 1)
    assert (told.cpu() == 1).all()
    message = filled(5 if number == 0 else 0, 100_000)
    dist.send(message, 1) if number == 0 else dist.recv(message, 0)
    assert (message.cpu() == 5).all()
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": number})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]), sys.argv[2]), 2)
