"""What carries weights from a learner to a sampler, and one copy of them for all ranks of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class WeightSource(Protocol):
    """All weights of one version, a group of layers at a time."""

    @property
    def version(self) -> int:
        """Number of training steps after which the policy had these weights."""

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in the model's own dtype under their Hugging Face names, every parameter once.

        A group's tensors are valid only until the next group is asked for: the caller copies what it keeps.
        Inside a rank's process this is collective: all ranks go through the groups together.
        """


Described = list[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and type of each tensor of a group."""


class Broadcast:
    """A `WeightSource` whose groups come from rank 0's. Collective: all ranks go through them together.

    A rank holds one group at a time, on its own device. The tensors pass rank 0's link to its GPU once.
    """

    def __init__(self, version: int, device: torch.device, source: WeightSource | None) -> None:
        """source: whose groups are sent, on rank 0; None on every other rank."""
        self.version = version
        self._device, self._source = device, source

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """`WeightSource.groups`."""
        return self._sent(self._source) if self._source else self._received()

    def _sent(self, source: WeightSource) -> Iterator[list[tuple[str, Tensor]]]:
        for group in source.groups():
            described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in group]
            dist.broadcast_object_list([described], src=0)
            yield [(name, self._passed_on(tensor.to(self._device))) for name, tensor in group]
        dist.broadcast_object_list([None], src=0)

    def _received(self) -> Iterator[list[tuple[str, Tensor]]]:
        while (described := self._next_group()) is not None:
            group = []
            for name, shape, dtype in described:
                group.append((name, self._passed_on(torch.empty(shape, dtype=dtype, device=self._device))))
            yield group

    def _next_group(self) -> Described | None:
        told: list[Described | None] = [None]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def _passed_on(self, tensor: Tensor) -> Tensor:
        """The tensor, which has rank 0's content afterwards."""
        whole = tensor.contiguous()
        dist.broadcast(whole, src=0)
        return whole
