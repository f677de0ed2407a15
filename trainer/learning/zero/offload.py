"""A rank's ZeRO-3 states out of the GPU while the engine is awake, and back for the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.staging import HostMemory
from trainer.learning.zero import private_names

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedStates:
    """Moves fp32 weights and Adam's moments to host memory and back; gradient memory is freed and allocated
    again.

    The low-precision shards stay: the weight sync gathers them. DeepSpeed's own `offload_states` moves fp32
    states for its FusedAdam only, and copies gradients, which mean nothing between two steps, to the host and
    back.
    """

    def __init__(self, zero: Any, device: torch.device, moves: bool = True) -> None:
        """zero: DeepSpeed's ZeRO-3 optimizer, which keeps the same tensors for life; only their storage
        moves. moves: whether they lie on a GPU at all; else nothing is moved."""
        self.zero = zero
        self.device = device
        self.moves = moves
        self.away = False
        self._memory = HostMemory()
        self._scratch_bytes: list[int] = []

    @torch.no_grad()
    def offload(self) -> None:
        """Moves them to host memory. Nothing may be under way in the policy."""
        if self.away or not self.moves:
            return
        self.zero.empty_partition_cache()
        self._wait()  # for the streams of gathering and reducing too
        self._scratch_bytes = []
        for tensor in private_names.gradient_memory(self.zero):
            # DeepSpeed holds views of it by parameter: they stay valid, which they would not if `.data` were
            # replaced.
            storage = tensor.untyped_storage()
            self._scratch_bytes.append(storage.nbytes())
            storage.resize_(0)
        for key, tensor in self._states():
            host = self._memory.like(key, tensor)
            host.copy_(tensor, non_blocking=True)
            tensor.data = host
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.away = True

    def lock_behind(self) -> None:
        """Locks the pages of new host memory in a thread, tens of seconds for a large model, while the engine
        samples. Not while it captures CUDA graphs: that forbids such calls to every thread.

        Adam makes its moments at the first update. Their host memory is made and locked here already: touched
        for the first time by their first move, it took 27 s of a 3B run's first sync.
        """
        if self.device.type == "cuda":
            for group, flat in enumerate(private_names.masters(self.zero)):
                for moment in MOMENTS:
                    self._memory.like((moment, group), flat, self.device)
        self._memory.lock_behind()

    @torch.no_grad()
    def reload(self) -> None:
        """Moves them back to the GPU."""
        if not self.away:
            return
        for key, tensor in self._states():
            self._memory.like(key, tensor)  # waits while its pages are being locked
            copy = torch.empty_like(tensor, device=self.device)
            tensor.data = copy.copy_(tensor, non_blocking=True)
        for tensor, size in zip(private_names.gradient_memory(self.zero), self._scratch_bytes, strict=True):
            tensor.untyped_storage().resize_(size)
        # no gradient is ever written to the padding of a partition
        private_names.summed_gradients(self.zero).zero_()
        self.away = False

    def _states(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Flat fp32 weights and Adam's moments, where there are any yet, by kind and parameter group."""
        groups = private_names.masters(self.zero)
        for group, flat in enumerate(groups):
            yield ("master", group), flat
        for group, flat in enumerate(groups):
            state = self.zero.optimizer.state.get(flat, {})
            for moment in MOMENTS:
                if moment in state:
                    yield (moment, group), state[moment]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
