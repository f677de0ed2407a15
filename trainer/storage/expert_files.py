"""How the files of a model hold its experts, and where that lies in the model's parameters. A parameter holds
a layer's experts together, [experts, outputs, inputs], gate and up one behind the other. Files hold them as
`Architecture.experts` says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

Read = Callable[[int, int], Tensor]
"""read(start, stop): elements [start, stop) of a flattened tensor."""
Layout = Literal["", "apart", "together", "transposed"]
APART = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
TOGETHER = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor of a file lies in a model's parameters."""

    name: str
    """The parameter, in the file's way to name it."""
    expert: int | None = None
    """None: the tensor is a whole parameter."""
    half: int | None = None
    """0 for gate and 1 for up, of a parameter that holds both."""
    transposed: bool = False

    def inside(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that has the tensor's shape."""
        if self.transposed:
            return parameter.transpose(1, 2)
        if self.expert is None:
            return parameter
        matrix = parameter[self.expert]
        return matrix if self.half is None else matrix.chunk(2)[self.half]


def tensor_place(key: str, layout: Layout) -> TensorPlace:
    """Where the tensor `key` of a file lies. Experts that are apart are known by their names, whatever the
    layout says: transformers saves a Qwen3.5-MoE's so."""
    match = APART.fullmatch(key) if layout else None
    if not match:
        return TensorPlace(key, transposed=layout == "transposed" and bool(TOGETHER.fullmatch(key)))
    prefix, expert, matrix = match.groups()
    if matrix == "down":
        return TensorPlace(f"{prefix}.down_proj", int(expert))
    return TensorPlace(f"{prefix}.gate_up_proj", int(expert), int(matrix == "up"))


def written_tensors(
    name: str, shape: tuple[int, ...], read: Read, layout: Layout
) -> Iterator[tuple[str, tuple[int, ...], Read]]:
    """(key, shape, read) of the tensors as which files hold a parameter; read: that of the parameter."""
    match = TOGETHER.fullmatch(name)
    if not match or layout in ("", "together"):
        yield name, shape, read
        return
    count, outputs, inputs = shape
    if layout == "transposed":
        yield name, (count, inputs, outputs), partial(_transposed, read, outputs, inputs)
        return
    prefix, matrices = match.groups()
    names = matrices.split("_")
    size = outputs // len(names)
    for number in range(count * len(names)):
        key = f"{prefix}.{number // len(names)}.{names[number % len(names)]}_proj.weight"
        yield key, (size, inputs), partial(_shifted, read, number * size * inputs)


def _shifted(read: Read, by: int, start: int, stop: int) -> Tensor:
    return read(by + start, by + stop)


def _transposed(read: Read, outputs: int, inputs: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of [experts, inputs, outputs]; whole experts are read."""
    size = outputs * inputs
    first, last = start // size, -(-stop // size)
    matrices = read(first * size, last * size).view(-1, outputs, inputs)
    return matrices.transpose(1, 2).reshape(-1)[start - first * size : stop - first * size]
