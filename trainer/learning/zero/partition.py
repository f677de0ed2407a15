"""Where a rank's fp32 weights and Adam's moments lie in DeepSpeed's optimizer at each ZeRO stage, and how to
set them.

Stage 3 cuts every flattened parameter into equal pieces, one per rank. Stages 1 and 2 lay a group's
parameters end to end and cut the whole, so that a rank holds all of some parameters, a part of two, and
nothing of the others. Either way a rank has at most one range [start, stop) of a parameter: a checkpoint of
one stage is read at any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.format import Shard
from trainer.learning.zero import private_names

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What there is of a trained parameter: the fp32 weights and Adam's moments."""


@dataclass(frozen=True)
class ShardPiece:
    """A rank's part of a parameter: elements [start, stop) of it flattened, from `at` on in the flat buffer
    `flat`."""

    start: int
    stop: int
    at: int
    flat: Any
    """fp32 weights of a parameter group on this rank; None where this rank has no part of the parameter."""


@dataclass(frozen=True)
class ModelPiece:
    """A rank's part of a parameter as the model computes with it: elements [start, stop) of it flattened."""

    name: str
    start: int
    stop: int
    values: Tensor
    """[stop - start] in the model's own type; a view that the next update changes."""


class Partition:
    """One rank's states. `publish` is collective; `load` waits for nobody."""

    def __init__(self, zero: Any, trained: dict[str, Any], stage: int, device: torch.device) -> None:
        """zero: DeepSpeed's ZeRO optimizer. trained: every trained parameter, by name."""
        self.zero = zero
        self.stage = stage
        self.device = device
        self.trained = trained

    def shards(self, host: Callable[[str, Tensor], Tensor]) -> dict[str, Shard]:
        """This rank's part of every trained parameter; `host(key, tensor)` copies it off the device."""
        shards = {}
        for name, p in self.trained.items():
            piece = self._piece(p)
            tensors = {kind: host(f"{kind}/{name}", view) for kind, view in self._views(piece).items()}
            shards[name] = Shard(shape=whole_shape(p), start=piece.start, stop=piece.stop, tensors=tensors)
        return shards

    @torch.no_grad()
    def load(self, stream: Callable[[Iterable[tuple[str, str, int, int]]], Iterable[Tensor]]) -> None:
        """Takes over weights and moments: `stream` gives [stop - start] of every (kind, name, start, stop) of
        a flat parameter."""
        pieces = {name: self._piece(p) for name, p in self.trained.items()}
        pieces = {name: piece for name, piece in pieces.items() if piece.start < piece.stop}
        views = {name: self._views(piece) for name, piece in pieces.items()}
        wanted = []
        for kind in sorted(KINDS):  # the files have one kind after the other
            wanted += [(kind, name, piece.start, piece.stop) for name, piece in pieces.items()]
        for (kind, name, _, _), value in zip(wanted, stream(wanted), strict=True):
            views[name][kind].copy_(value)

        if self.stage == 3:
            for name, view in views.items():
                master = view["master"]
                self.trained[name].ds_tensor.data.view(-1)[: len(master)].copy_(master)

    @torch.no_grad()
    def publish(self, steps: int) -> None:
        """After every rank's `load`: the model's own weights are the loaded ones, after `steps` steps of
        Adam."""
        for state in self.zero.optimizer.state.values():
            state["step"].fill_(float(steps))
        private_names.renew_weights(self.zero, self.stage)

    def pieces(self) -> list[ModelPiece]:
        """This rank's part of the model's own weights of every trained parameter; stage 3 only. Gathers
        nothing."""
        assert self.stage == 3, "at other stages a rank holds the whole model"
        own_pieces = []
        for name, p in self.trained.items():
            piece = self._piece(p)
            values = p.ds_tensor.detach().view(-1)[: piece.stop - piece.start]
            own_pieces.append(ModelPiece(name, piece.start, piece.stop, values))
        return own_pieces

    def _piece(self, p: Any) -> ShardPiece:
        """This rank's part of a trained parameter. At stage 3 all ranks hold equally many elements, and those
        past the parameter's end are padding."""
        if self.stage < 3:
            return ShardPiece(*private_names.fragment_of(self.zero, p))
        size = p.ds_tensor.numel()
        start = min(dist.get_rank() * size, p.ds_numel)
        stop = min(start + size, p.ds_numel)
        return ShardPiece(start, stop, *private_names.place_of(self.zero, p))

    def _views(self, piece: ShardPiece) -> dict[str, Tensor]:
        """Views [stop - start] of the flat buffers that hold a piece; Adam's are made here before the first
        step."""
        if piece.flat is None:
            return {kind: torch.empty(0) for kind in KINDS}
        optimizer = self.zero.optimizer
        state = optimizer.state[piece.flat]
        if not state:
            # Adam's fused kernel wants the number of steps on its device.
            step_device = self.device if optimizer.defaults.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"] = torch.zeros_like(piece.flat)
            state["exp_avg_sq"] = torch.zeros_like(piece.flat)
        buffers = {
            "master": piece.flat.detach(),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
        length = piece.stop - piece.start
        return {kind: buffer.narrow(0, piece.at, length) for kind, buffer in buffers.items()}


def whole_shape(p: Any) -> tuple[int, ...]:
    """Shape of a parameter that may be sharded."""
    return tuple(getattr(p, "ds_shape", p.shape))


def bucket_parameters(named: list[tuple[str, Any]], limit: int) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive parameters of up to `limit` bytes together; a larger one alone."""
    bucket: list[tuple[str, Any]] = []
    bucket_bytes = 0
    for name, p in named:
        parameter_bytes = math.prod(whole_shape(p)) * p.element_size()
        if bucket and bucket_bytes + parameter_bytes > limit:
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append((name, p))
        bucket_bytes += parameter_bytes
    if bucket:
        yield bucket
