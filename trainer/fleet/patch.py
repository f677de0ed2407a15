"""Patches between two versions of weights: lossless, 1 to 3% of the weights in bf16.

Both sides give the weights as pieces: flat tensors that stand for one tensor of all their elements.

Sparse, for types of two bytes: the gaps between changed elements, and each change as a number of units in the
last place, from the smaller numbers to the larger. Dense, for other types and where more than DENSE_SHARE of
the elements changed: the xor of all elements. Either way the bytes of one significance stand together, most
of them zero, and zstd packs them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from msgspec import Struct, msgpack
from torch import Tensor

from trainer.system.records import Count

DENSE_SHARE = 0.15
LARGEST_GAP = 2**32 - 1
CHUNK_ELEMENTS = 1 << 24
"""Elements per pass, which bounds the scratch memory of both sides."""
CHECKSUM = struct.Struct("<I")
NUMBER = np.dtype("<u4")
"""What the gaps and the changes of a sparse patch are, its two columns."""


class PatchRecord(Struct, frozen=True, array_like=True):
    """What a patch holds, before its checksum."""

    kind: Literal["sparse", "dense"]
    width: int
    """Bytes of an element."""
    elements: Count
    columns: list[tuple[Count, bytes]]
    """How many numbers each has, and these, packed: gaps and changes (sparse), or parts of all elements."""


@dataclass(frozen=True)
class SparseChange:
    """A few changed elements."""

    positions: Tensor
    """[changes] int64, ascending."""
    steps: Tensor
    """[changes] int32: units in the last place."""


@dataclass(frozen=True)
class DenseChange:
    xor: Tensor
    """[elements * width] uint8."""


# --- numbers as bytes ---------------------------------------------------------------------------------------


def to_ordered(bits: Tensor) -> Tensor:
    """int16 bits of floating-point numbers as int32 in the order of the numbers: neighbors differ by 1, and
    -0.0 comes right below 0.0."""
    wide = bits.to(torch.int32)
    return torch.where(wide < 0, -(wide & 0x7FFF) - 1, wide)


def from_ordered(places: Tensor) -> Tensor:
    return torch.where(places < 0, (-(places + 1)) | 0x8000, places).to(torch.int16)


def _folded(steps: Tensor) -> Tensor:
    """+1, -1, +2, -2, ... as 0, 1, 2, 3, ..."""
    return torch.where(steps < 0, -2 * steps - 1, 2 * steps - 2)


def _pack(numbers: np.ndarray, width: int) -> bytes:
    """Numbers of `width` bytes, the bytes of one significance together."""
    if not numbers.size:
        return b""
    planes = np.ascontiguousarray(numbers).view("u1").reshape(-1, width).T
    return pa.Codec("zstd", compression_level=1).compress(np.ascontiguousarray(planes).data, asbytes=True)


def _unpack(data: bytes, count: int, width: int) -> np.ndarray:
    if not count:
        return np.zeros(0, "u1")
    raw = pa.Codec("zstd").decompress(data, count * width, asbytes=True)
    return np.frombuffer(raw, "u1").reshape(width, -1).T.reshape(-1)


# --- encoding -----------------------------------------------------------------------------------------------


def encode_patch(old: Sequence[Tensor], new: Sequence[Tensor]) -> bytes:
    """The patch from `old` to `new`: pieces of equal lengths and types. Old ones may be on another device."""
    width = new[0].element_size() if new else 2
    record = _encode_sparse(old, new) if width == 2 else None
    patch = msgpack.encode(record or _encode_dense(old, new, width))
    return patch + CHECKSUM.pack(zlib.crc32(patch))


def _chunks(old: Sequence[Tensor], new: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both on the device of the new one, in order."""
    for before, after in zip(old, new, strict=True):
        for start in range(0, len(after), CHUNK_ELEMENTS):
            part = after[start : start + CHUNK_ELEMENTS]
            yield before[start : start + CHUNK_ELEMENTS].to(part.device), part


def _encode_sparse(old: Sequence[Tensor], new: Sequence[Tensor]) -> PatchRecord | None:
    """None where dense is smaller."""
    elements = sum(len(piece) for piece in new)
    gap_parts: list[Tensor] = []
    step_parts: list[Tensor] = []
    start = count = 0
    last = -1
    for before, after in _chunks(old, new):
        x, y = before.view(torch.int16), after.view(torch.int16)
        at = (x != y).nonzero().view(-1)
        if len(at):
            count += len(at)
            steps = to_ordered(y[at]) - to_ordered(x[at])
            gaps = torch.diff(at + start, prepend=at.new_tensor([last])) - 1
            last = start + int(at[-1])
            if count > DENSE_SHARE * elements or int(gaps[0]) > LARGEST_GAP:
                return None
            gap_parts.append(gaps.cpu())
            step_parts.append(_folded(steps).cpu())
        start += len(after)

    columns = []
    for parts in (gap_parts, step_parts):
        numbers = torch.cat(parts).numpy() if parts else np.zeros(0)
        columns.append((count, _pack(numbers.astype(NUMBER), NUMBER.itemsize)))
    return PatchRecord("sparse", 2, elements, columns)


def _encode_dense(old: Sequence[Tensor], new: Sequence[Tensor], width: int) -> PatchRecord:
    columns = []
    for before, after in _chunks(old, new):
        xor = (before.view(torch.uint8) ^ after.view(torch.uint8)).cpu().numpy()
        columns.append((len(xor) // width, _pack(xor, width)))
    return PatchRecord("dense", width, sum(len(piece) for piece in new), columns)


# --- decoding -----------------------------------------------------------------------------------------------


def decode_patch(patch: bytes, elements: int, width: int) -> SparseChange | DenseChange:
    """What a patch changes in weights of `elements` elements of `width` bytes. Raises ValueError for bytes
    that are no such patch; it never takes more memory than those weights do."""
    view = memoryview(patch)
    body, checksum = view[: -CHECKSUM.size], view[-CHECKSUM.size :]
    if len(checksum) < CHECKSUM.size or zlib.crc32(body) != CHECKSUM.unpack(checksum)[0]:
        raise ValueError("the patch is damaged: its checksum is another")
    try:
        record = msgpack.decode(body, type=PatchRecord)
        if (record.elements, record.width) != (elements, width):
            raise ValueError(
                f"a patch of {record.elements} elements of {record.width} bytes, for weights of {elements} of"
                f" {width}"
            )
        sizes = [size for size, _ in record.columns]
        if record.kind == "sparse" and len(sizes) == 2 and sizes[0] == sizes[1] <= elements:
            return _decode_sparse(record)
        if record.kind == "dense" and sum(sizes) == elements:
            return _decode_dense(record)
    except (pa.ArrowException, OSError, OverflowError) as error:
        raise ValueError(f"the patch is damaged: {error}") from error
    raise ValueError("the patch is damaged: it has other columns")


def _decode_sparse(record: PatchRecord) -> SparseChange:
    gaps, folded = (
        _unpack(data, size, NUMBER.itemsize).view(NUMBER).astype(np.int64) for size, data in record.columns
    )
    steps = np.where(folded & 1, -(folded + 1) // 2, folded // 2 + 1).astype(np.int32)
    positions = np.cumsum(gaps + 1) - 1
    if len(positions) and positions[-1] >= record.elements:
        raise ValueError("the patch is damaged: it changes elements behind the end")
    return SparseChange(torch.from_numpy(positions), torch.from_numpy(steps))


def _decode_dense(record: PatchRecord) -> DenseChange:
    xor = np.empty(record.elements * record.width, np.uint8)
    at = 0
    for size, data in record.columns:
        xor[at : at + size * record.width] = _unpack(data, size, record.width)
        at += size * record.width
    return DenseChange(torch.from_numpy(xor))


# --- applying -----------------------------------------------------------------------------------------------


def apply_patch(pieces: Sequence[Tensor], change: SparseChange | DenseChange) -> None:
    """Changes the pieces in place. Raises ValueError, with nothing changed, where the result would be no
    number of this type: then the weights are not those that the patch was made from."""
    if isinstance(change, DenseChange):
        _apply_dense(pieces, change)
        return
    ready = []
    start = 0
    for piece in pieces:
        bounds = torch.tensor([start, start + len(piece)])
        first, last = torch.searchsorted(change.positions, bounds).tolist()
        start += len(piece)
        if first == last:
            continue
        bits = piece.view(torch.int16)
        local = change.positions[first:last] - (start - len(piece))
        places = to_ordered(bits[local]) + change.steps[first:last]
        if int(places.min()) < -0x8000 or int(places.max()) > 0x7FFF:
            raise ValueError("the patch was made from other weights")
        ready.append((bits, local, from_ordered(places)))
    for bits, local, values in ready:
        bits[local] = values


def _apply_dense(pieces: Sequence[Tensor], change: DenseChange) -> None:
    if sum(piece.nbytes for piece in pieces) != len(change.xor):
        raise ValueError("the patch is for other weights")
    at = 0
    for piece in pieces:
        size = piece.nbytes
        if size:
            piece.view(torch.uint8).bitwise_xor_(change.xor[at : at + size])
        at += size
