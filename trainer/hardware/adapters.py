"""Sizes of LoRA's matrices, from a model's shape."""

from __future__ import annotations

from trainer.hardware.model_shapes import Shape


def adapted_linears(shape: Shape, vision: bool) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer that gets an adapter. In a mixture of experts those are
    attention's: experts and routers stay as they are."""
    h = shape.hidden
    i = shape.intermediate
    mlp = [] if shape.experts else [(h, i), (h, i), (i, h)]
    linears = [*shape.attention_linears, *mlp] * shape.attention_layers
    if shape.delta:
        linears += [*shape.delta.linears(h), *mlp] * shape.delta.layers
    if vision and (v := shape.vision):
        linears += [(v.hidden, 3 * v.hidden), (v.hidden, v.hidden)] * v.depth
        linears += [(v.hidden, v.intermediate)] * (1 + v.gated) * v.depth + [
            (v.intermediate, v.hidden)
        ] * v.depth
    return linears


def adapter_sizes(shape: Shape, rank: int, vision: bool) -> list[int]:
    """Elements of every A [rank, inputs] and B [outputs, rank]."""
    sizes: list[int] = []
    for pair in adapted_linears(shape, vision) if rank else ():
        for n in pair:
            sizes.append(rank * n)
    return sizes
