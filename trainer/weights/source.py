"""What carries weights from a learner to a sampler, and one copy of them for all ranks of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class WeightSource(Protocol):
    """All weights of one version, a group of layers at a time."""

    @property
    def version(self) -> int:
        """Number of training steps after which the policy had these weights."""

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in the model's own dtype under their Hugging Face names, every parameter once. A
        group's tensors are valid only until the next group is asked for: the caller copies what it keeps.
        Inside a rank's process this is collective: all ranks go through the groups together."""


class Broadcast:
    """A `WeightSource` whose groups come from rank 0's. Collective: all ranks go through them together. A
    rank holds one group at a time, on its own device. The tensors pass rank 0's link to its GPU once."""

    def __init__(self, version: int, device: torch.device, source: WeightSource | None) -> None:
        """source: whose groups are sent, on rank 0; None on every other rank."""
        self.version = version
        self._device, self._source = device, source

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """`WeightSource.groups`."""
        sent = self._source.groups() if self._source else iter(())
        while True:
            group = next(sent, None)
            described: list[Any] = [group and [(name, part.shape, part.dtype) for name, part in group]]
            dist.broadcast_object_list(described, src=0)
            if described[0] is None:
                return
            whole = []
            for number, (name, shape, dtype) in enumerate(described[0]):
                if group:
                    tensor = group[number][1].to(self._device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=self._device)
                dist.broadcast(tensor, src=0)
                whole.append((name, tensor))
            yield whole
