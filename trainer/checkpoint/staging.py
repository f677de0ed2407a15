"""Host memory that tensors of a GPU are copied into: for checkpoints, and for states that leave the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

OWN_PAGES = 32 << 20
"""Larger memory has pages of its own (glibc's highest mmap threshold); a page can be locked for one tensor
only."""


def host_buffer(like: Tensor) -> Tensor:
    """An empty host tensor of the shape and type of `like`. Its pages are not locked yet.

    Locked, it takes as many bytes as it holds. torch's own pinned memory (`pin_memory=True`) comes in powers
    of two: the staging of a 7B checkpoint would take 175 GiB of a node where 93 are planned.
    """
    return torch.empty_like(like, device="cpu", requires_grad=False)


def lock_pages(buffer: Tensor, device: torch.device) -> None:
    """Locks the pages of a large host tensor, so that copies between it and the GPU `device` need no third
    place. Tens of seconds for a large model: a thread does it. Nothing happens where `device` is no GPU.

    A new thread's GPU is the machine's first one: without its own, each rank would make a context there.
    """
    if device.type != "cuda" or buffer.nbytes <= OWN_PAGES:
        return
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
