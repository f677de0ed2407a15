"""Host memory that tensors of a GPU are copied into: for checkpoints, and for states that leave the GPU."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

LARGE = 32 << 20
"""Bytes from which a tensor's pages are locked. Smaller ones are copied quickly anyway."""


class HostPages(mmap.mmap):
    """Memory of one host tensor, in pages of its own. It lives as long as any view of the tensor does. Locked
    pages are unlocked before they are given back: the driver would otherwise take whatever lies at their
    address later for locked memory, and copy to and from pages that are gone."""

    address = 0
    """Where the locked memory begins; 0 while it is not locked."""

    def lock(self, tensor: Tensor, device: torch.device) -> None:
        """Locks the pages of `tensor`, which lies in this memory, so that copies between it and the GPU
        `device` need no third place. A new thread's GPU is the machine's first one: without its own, each
        rank would make a context there."""
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        self.address = tensor.data_ptr()

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.address))


class HostMemory:
    """Host tensors by key, kept for the next copy. Large ones are locked behind their first use, in a thread:
    that takes tens of seconds for a large model. torch's own pinned memory (`pin_memory=True`) comes in
    powers of two: the staging of a 7B checkpoint would take 175 GiB of a node where 93 are planned."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensor] = {}
        self._unlocked: dict[Hashable, tuple[HostPages, Tensor, torch.device]] = {}
        self._locking: dict[Hashable, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "pages")
        self._warned = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def like(self, key: Hashable, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """The host tensor of `key`, of the shape and type of `tensor`. Nobody is locking it when this
        returns, or afterwards until `lock_behind`. device: the GPU that it is copied from, where `tensor` is
        not there now."""
        if key in self._locking:
            self._locking.pop(key).result()
        held = self._held.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            self._unlocked.pop(key, None)
            held = self._held[key] = self._made(key, tensor, device or tensor.device)
        return held

    def _made(self, key: Hashable, like: Tensor, device: torch.device) -> Tensor:
        if like.nbytes < LARGE:
            return torch.empty_like(like, device="cpu", requires_grad=False)
        pages = HostPages(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made = torch.frombuffer(pages, dtype=like.dtype).view(like.shape)
        if device.type == "cuda":
            self._unlocked[key] = pages, made, device
        return made

    def lock_behind(self) -> None:
        """Starts to lock what is new, in the order in which it was made."""
        for key, (pages, tensor, device) in self._unlocked.items():
            self._locking[key] = self._thread.submit(self._lock, pages, tensor, device)
        self._unlocked.clear()

    def _lock(self, pages: HostPages, tensor: Tensor, device: torch.device) -> None:
        try:
            pages.lock(tensor, device)
        except RuntimeError as error:  # of the driver: a limit of the container, say
            if not self._warned:
                print(
                    f"warning: the driver does not lock host memory ({error}): copies take longer", flush=True
                )
            self._warned = True
