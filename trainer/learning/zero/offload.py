"""A rank's ZeRO-3 states out of the GPU while the engine is awake, and back for the update."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.staging import host_buffer, lock_pages


class States:
    """Moves fp32 weights and Adam's moments to host memory and back; gradient memory is freed and allocated
    again.

    The low-precision shards stay: the weight sync gathers them. DeepSpeed's own `offload_states` moves fp32
    states for its FusedAdam only, and copies gradients, which mean nothing between two steps, to the host and
    back.
    """

    def __init__(self, zero: Any, device: torch.device) -> None:
        """zero: DeepSpeed's ZeRO-3 optimizer, which keeps the same tensors for life; only their storage
        moves."""
        self.zero = zero
        self.device = device
        self.away = False
        self._host: list[Tensor] = []
        self._unlocked: list[Tensor] = []
        self._locking: Thread | None = None
        self._scratch_bytes: list[int] = []

    @torch.no_grad()
    def offload(self) -> None:
        """Moves them to host memory. Nothing may be under way in the policy."""
        if self.away:
            return
        self.zero.empty_partition_cache()
        self._wait()  # for the streams of gathering and reducing too
        self._scratch_bytes = []
        for tensor in self._scratch():
            # DeepSpeed holds views of it by parameter: they stay valid, which they would not if `.data` were
            # replaced.
            storage = tensor.untyped_storage()
            self._scratch_bytes.append(storage.nbytes())
            storage.resize_(0)
        for number, tensor in enumerate(self._states()):
            if number == len(self._host):
                buffer = host_buffer(tensor)
                self._host.append(buffer)
                self._unlocked.append(buffer)
            host = self._host[number]
            host.copy_(tensor, non_blocking=True)
            tensor.data = host
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.away = True

    def lock_behind(self) -> None:
        """Locks the pages of new host memory in a thread, tens of seconds for a large model, while the engine
        samples. Not while it captures CUDA graphs: that forbids such calls to every thread."""
        if self.device.type != "cuda" or not self._unlocked:
            return
        new, self._unlocked = self._unlocked, []
        self._locking = Thread(target=_lock, args=(new, self.device), daemon=True)
        self._locking.start()

    @torch.no_grad()
    def reload(self) -> None:
        """Moves them back to the GPU."""
        if not self.away:
            return
        if self._locking is not None:
            self._locking.join()
            self._locking = None
        for tensor in self._states():
            copy = torch.empty_like(tensor, device=self.device)
            tensor.data = copy.copy_(tensor, non_blocking=True)
        for tensor, size in zip(self._scratch(), self._scratch_bytes, strict=True):
            tensor.untyped_storage().resize_(size)
        # no gradient is ever written to the padding of a partition
        self.zero.grad_partitions_flat_buffer.zero_()
        self.away = False

    def _states(self) -> Iterator[Tensor]:
        """Flat fp32 weights and Adam's moments."""
        yield from self.zero.fp32_partitioned_groups_flat
        for state in self.zero.optimizer.state.values():
            yield state["exp_avg"]
            yield state["exp_avg_sq"]

    def _scratch(self) -> Iterator[Tensor]:
        """Gradient memory, whose content means nothing between two steps."""
        yield self.zero.grad_partitions_flat_buffer
        for bucket in self.zero.ipg_buckets.values():
            if bucket.buffer is not None:
                yield bucket.buffer

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _lock(buffers: list[Tensor], device: torch.device) -> None:
    for buffer in buffers:
        lock_pages(buffer, device)
