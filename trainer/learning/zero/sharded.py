"""A model's blocks under ZeRO-3: each is gathered at once, ahead of its use, and let go of behind it; its
gradients are reduced together. On one rank the shards are the weights, for good.

DeepSpeed does the same for each parameter, in Python, which took the host as long as the whole block's
kernels. It keeps what it lays out (shards, flat buffers, the optimizer's step), and on several ranks the
modules between the blocks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.learning.zero import private_names
from trainer.learning.zero.setup import GATHERS

AHEAD = 4
"""Blocks that are gathered ahead in a forward pass, at most: one at a time, between other work, took the host
half as long again: its caches had gone cold. In a backward pass a reduction would wait for all of them."""
ALIGNED = 64
"""Elements at whose multiples a parameter begins: kernels for matrices want 16 bytes."""


class _Lane:
    """A stream of a GPU beside the one that computes. On a CPU one thing is done after the other. torch's
    streams of any accelerator: those of `torch.cuda` take the host ten times as long."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = stream or torch.Stream(device)

    def event(self) -> Any:
        """What `beside` and `wait` are told by."""
        return torch.Event(self._device) if self._stream else None

    @contextmanager
    def beside(self, event: Any) -> Generator[None]:
        """Work within begins when all that was launched before is done; `event` is when it ends."""
        if self._stream is None:
            yield
            return
        computing = torch.accelerator.current_stream()
        event.record(computing)
        event.wait(self._stream)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(computing)
        event.record(self._stream)

    def wait(self, event: Any) -> None:
        """What is launched from here on waits for `event`; the host does not."""
        if self._stream is not None:
            event.wait()


class _Memory:
    """What a block's whole weights lie in; it is there only while the block is whole. Views of it are made
    once."""

    def __init__(self, parameters: Sequence[Any], sizes: Sequence[int]) -> None:
        """sizes: elements of this rank's shard of each parameter."""
        world = dist.get_world_size()
        room = [-(-size * world // ALIGNED) * ALIGNED for size in sizes]
        flat = parameters[0].ds_tensor.new_empty(sum(room))
        self.parts: list[Tensor] = []
        """A parameter's [ranks, a rank's elements]."""
        self.whole: list[Tensor] = []
        for parameter, size, piece in zip(parameters, sizes, flat.split(room), strict=True):
            self.parts.append(piece[: size * world].view(world, size))
            self.whole.append(piece[: parameter.ds_numel].view(parameter.ds_shape))
        self.nothing = flat.new_empty(0)
        self.elements = len(flat)
        self.storage = flat.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.storage.resize_(0)


class _Block:
    """One block's weights. Outside of a pass, and to DeepSpeed always, they are shards."""

    def __init__(self, module: nn.Module, lane: _Lane) -> None:
        self.module = module
        self.sharded: list[Any] = list(module.parameters())
        self.trained = any(p.requires_grad for p in self.sharded)
        self.shards = [p.ds_tensor for p in self.sharded]
        self.sizes = [shard.numel() for shard in self.shards]
        self.following: list[_Block] = []
        """Gathered while this one computes forward."""
        self.preceding: list[_Block] = []
        """Gathered while this one computes backward."""
        self.kept = False
        """Whether it stays whole from the forward to the backward pass."""
        self._lane = lane
        self._ready = lane.event()
        self._gathered = False
        self._in_place = False
        self._group = private_names.process_group(self.sharded[0])
        self.memory = _Memory(self.sharded, self.sizes)

    def gather(self) -> None:
        """Begins to gather the weights, unless that has begun."""
        if self._gathered:
            return
        # Memory of the stream that computes: what is launched there later may have it as soon as it is free
        # here, so the host can be ahead by any number of blocks and needs no more of it.
        self.memory.storage.resize_(self.memory.bytes)
        with self._lane.beside(self._ready):
            shard = torch.cat(self.shards)
            ranks = shard.new_empty(len(self.memory.parts[0]), len(shard))
            dist.all_gather_single(ranks.view(-1), shard, self._group)
            torch.split_with_sizes_copy(ranks, self.sizes, 1, out=self.memory.parts)
        GATHERS.count(ranks)
        self._gathered = True

    def use(self) -> None:
        """Lets the module compute with its whole weights."""
        if self._in_place:
            return
        self.gather()
        self._lane.wait(self._ready)
        for parameter, whole in zip(self.sharded, self.memory.whole, strict=True):
            parameter.data = whole
        self._in_place = True

    def release(self) -> None:
        """Lets go of the whole weights."""
        for parameter in self.sharded:
            parameter.data = self.memory.nothing
        self.memory.storage.resize_(0)
        self._gathered = self._in_place = False

    def before_forward(self, *_: Any) -> None:
        """A hook."""
        self.use()
        for block in self.following:
            block.gather()

    def after_forward(self, *_: Any) -> None:
        """A hook."""
        if not (self.kept and torch.is_grad_enabled()):
            self.release()

    def before_backward(self, *_: Any) -> None:
        """A hook."""
        self.use()
        for block in self.preceding:
            block.gather()

    def after_backward(self, *_: Any) -> None:
        """A hook."""
        self.release()


class Blocks:
    """Gathers the blocks of one model in turn. Passes are collective."""

    def __init__(self, modules: Sequence[nn.Module], offload: Any, device: torch.device, live: int) -> None:
        """modules: the blocks, in the order of a pass. offload: DeepSpeed's hooks on the model. live:
        elements that may be whole beside a block: half for those gathered ahead (all of it for the next one
        alone) or kept between two passes, half for what lies between the blocks."""
        private_names.release_hooks(modules, offload)
        lane = _Lane(device)
        blocks = [_Block(module, lane) for module in modules]
        for block, ahead in _gathered_ahead(blocks, live, AHEAD):
            block.following = ahead
        trained = [block for block in blocks if block.trained]
        for block, ahead in _gathered_ahead(trained[::-1], live, 1):
            block.preceding = ahead

        kept = 0
        for block in reversed(trained):
            kept += block.memory.elements
            block.kept = kept <= live // 2
        for block in blocks:
            block.module.register_forward_pre_hook(block.before_forward)
            block.module.register_forward_hook(block.after_forward)
        for block in trained:
            block.module.register_full_backward_pre_hook(block.before_backward)
            block.module.register_full_backward_hook(block.after_backward)


def _gathered_ahead(blocks: list[_Block], live: int, most: int) -> Iterator[tuple[_Block, list[_Block]]]:
    """Blocks in the order of a pass that begin to gather others, and these: the next one, if it may live, or
    up to `most` in half of what may. live: elements, as in `Blocks`."""
    at = 0
    while at + 1 < len(blocks):
        ahead = blocks[at + 1 : at + 1 + most]
        while len(ahead) > 1 and sum(block.memory.elements for block in ahead) > live // 2:
            ahead.pop()
        if ahead[0].memory.elements <= live:
            yield blocks[at], ahead
        at += len(ahead)


class Gradients:
    """How gradients come to the sums that the optimizer's step reads: by DeepSpeed."""

    def begin(self) -> None:
        """Before an update's first pass."""

    def end(self) -> None:
        """After an update's last pass."""


class BlockGradients(Gradients):
    """Averages a block's gradients over the ranks, all at once, and adds this rank's part to the sums. Needs
    an optimizer on the device of the gradients."""

    def __init__(self, modules: Sequence[nn.Module], zero: Any, device: torch.device) -> None:
        """modules: the blocks, in the order of a pass. zero: DeepSpeed's ZeRO-3 optimizer."""
        private_names.release_reductions(zero, alone=False)
        self._zero = zero
        self._lane = _Lane(device, private_names.reducing_stream(zero))
        self._reduced = self._lane.event()
        self._rows: Tensor | None = None
        first = True
        for module in modules:
            trained = [p for p in module.parameters() if p.requires_grad]
            if trained:
                sums = [private_names.sum_of(zero, p) for p in trained]
                module.register_full_backward_hook(partial(self._block, trained, sums, first))
                first = False

    def _block(self, trained: list[Any], sums: list[Tensor], last: bool, *_: Any) -> None:
        """A hook behind a block's backward pass. last: no other block comes behind it."""
        begins = private_names.begin_reduction(self._zero)
        self._wait()
        world = dist.get_world_size()
        gradients = []
        for parameter in trained:  # an expert that no token came to has none
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(gradient.flatten())
            parameter.grad = None
        kind = private_names.reduced_type(self._zero)
        self._rows = torch._chunk_cat(gradients, 0, world).to(kind).div_(world)  # [world, a rank's elements]
        del gradients, gradient
        with self._lane.beside(self._reduced):
            part = self._rows.new_empty(self._rows.shape[1])
            dist.reduce_scatter_single(
                part, self._rows.view(-1), group=private_names.process_group(trained[0])
            )
            parts = part.to(sums[0].dtype).split([len(of_parameter) for of_parameter in sums])
            if begins:
                torch._foreach_copy_(sums, parts)
            else:
                torch._foreach_add_(sums, parts)
        if last:
            self._wait()
        private_names.end_reduction(self._zero)

    def _wait(self) -> None:
        """Frees what is being reduced, for what is launched behind it."""
        if self._rows is not None:
            self._lane.wait(self._reduced)
            self._rows = None


class OneRankGradients(Gradients):
    """Adds gradients up where the optimizer's step reads them: one rank has nothing to reduce. Needs an
    optimizer on the device of the gradients."""

    def __init__(self, zero: Any) -> None:
        """zero: DeepSpeed's ZeRO-3 optimizer."""
        private_names.release_reductions(zero, alone=True)
        self._flat = private_names.summed_gradients(zero)
        self._views: list[tuple[Any, Tensor]] = []
        for parameter in private_names.trained_parameters(zero):
            self._views.append((parameter, private_names.sum_of(zero, parameter).view(parameter.ds_shape)))
        self._same_type = all(view.dtype == parameter.dtype for parameter, view in self._views)
        if not self._same_type:
            for parameter, view in self._views:
                parameter.register_post_accumulate_grad_hook(partial(_add, view))

    def begin(self) -> None:
        """All gradients are 0."""
        self._flat.zero_()
        if self._same_type:
            for parameter, view in self._views:
                parameter.grad = view

    def end(self) -> None:
        """DeepSpeed's step finds no gradient at a parameter."""
        for parameter, _ in self._views:
            parameter.grad = None


def _add(view: Tensor, parameter: Tensor) -> None:
    """A pass's gradient into the sum of another type."""
    assert parameter.grad is not None
    view.add_(parameter.grad)
    parameter.grad = None


def gather(engine: Any, modules: Sequence[nn.Module], offload: Any, device: torch.device, live: int) -> None:
    """Gathers a model's weights in DeepSpeed's place. engine: DeepSpeed's around it. modules, offload, live:
    as in `Blocks`. A rank alone has nothing to gather: all modules keep their weights."""
    if dist.get_world_size() == 1:
        modules = [engine.module]
        private_names.keep_gathered(engine.module, offload)
    else:
        Blocks(modules, offload, device, live)
    private_names.unwatch(engine, modules)


def gradients_of(modules: Sequence[nn.Module], zero: Any, device: torch.device) -> Gradients:
    """How the gradients of a model are summed whose weights are gathered so."""
    if dist.get_world_size() == 1:
        return OneRankGradients(zero)
    return BlockGradients(modules, zero, device)
