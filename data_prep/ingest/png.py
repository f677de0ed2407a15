"""Gray means of a PNG over a coarse grid: reads it about twice as fast as a general decoder, as nothing else is kept.

What is read here is certainly whole: its stream inflates to the right length with the right checksum, and every row has
a known filter. Anything else, damage included, is left to Pillow, whose verdict counts. Inflation is ISA-L's, the
filters are undone by `png_filters.py`.
"""

from __future__ import annotations

import struct
import sys

import numpy as np
from isal import isal_zlib
from isal.igzip_lib import IsalError

try:
    from data_prep.ingest.png_filters import LINES, SPARE, sum_rows
except ImportError:  # no numba: it comes with vLLM
    sum_rows = None
except Exception as error:  # a numba that this does not suit: slower, but no picture is lost
    print(f"note: PNG is read by Pillow, which takes three times as long: numba failed ({error})", file=sys.stderr)
    sum_rows = None

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 1 << 24
"""Larger pictures are left to Pillow, which needs half the memory."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Bytes of a pixel, by the header's color type: gray, RGB, palette, gray and alpha, RGBA."""
_COLORS = {0: 1, 2: 3, 3: 1, 4: 1, 6: 3}
"""Of them, those that are summed: a palette's pixels as gray, alpha as what it leaves of the color on white."""
_NO_PALETTE = np.empty(0, dtype=np.uint8)
_TO_GRAY = np.array([19595, 38470, 7471], dtype=np.int32)
"""Of red, green and blue, in 65536ths: Pillow's."""


def gray_means(data: bytes, side: int) -> np.ndarray | None:
    """Mean levels of the side x side parts of a picture, transparent pixels white. None: let Pillow read it.

    Returns [side, side] float32, within a level of what Pillow's conversion to L and its box filter give.
    """
    if sum_rows is None or data[:8] != _SIGNATURE or data[12:16] != b"IHDR":
        return None
    width, height, bits, color, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    usual = bits == 8 and not interlaced and color in _CHANNELS
    if not usual or min(width, height) < side or width * height > MAX_PIXELS:
        return None
    chunks = _chunks(data)
    if chunks is None or (color == 3) != (chunks[1] is not None):
        return None
    channels = _CHANNELS[color]
    rows = _inflated(chunks[0], height, 1 + width * channels)
    if rows is None:
        return None
    levels = _NO_PALETTE if chunks[1] is None else chunks[1]
    sums = np.zeros((side, width * _COLORS[color]), dtype=np.uint32)
    lines = np.zeros((LINES, width * channels + SPARE), dtype=np.uint8)
    if not sum_rows(rows, channels, levels, lines, np.empty(sums.shape[1], dtype=np.uint8), sums):
        return None
    gray = sums.reshape(side, width, 3) @ (_TO_GRAY / 65536) if _COLORS[color] == 3 else sums.astype(np.float64)
    edges_y, edges_x = _edges(height, side), _edges(width, side)
    parts = np.add.reduceat(gray, edges_x[:-1], axis=1)
    return (parts / np.outer(np.diff(edges_y), np.diff(edges_x))).astype(np.float32)


def _chunks(data: bytes) -> tuple[bytes, np.ndarray | None] | None:
    """The compressed stream, and the palette's levels if there is one; None if anything is unusual."""
    view, at = memoryview(data), 8
    stream: list[memoryview] = []
    levels = None
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], view[at + 8 : at + 8 + size]
        if kind == b"IDAT":
            stream.append(body)
        elif stream:
            return (bytes(stream[0]) if len(stream) == 1 else b"".join(stream)), levels
        elif kind == b"tRNS" or (kind == b"PLTE" and (size % 3 or size > 768)):
            return None
        elif kind == b"PLTE":
            palette = np.frombuffer(body, np.uint8).reshape(-1, 3).astype(np.int32)
            levels = np.zeros(256, dtype=np.uint8)
            levels[: len(palette)] = (palette @ _TO_GRAY + 0x8000) >> 16
        at += 12 + size
    return None


def _inflated(stream: bytes, height: int, row_bytes: int) -> np.ndarray | None:
    """Filtered rows [height, row_bytes]; None if the stream does not hold exactly these, checksum included."""
    inflate = isal_zlib.decompressobj()
    try:
        raw = inflate.decompress(stream, height * row_bytes)
        if len(raw) != height * row_bytes or (not inflate.eof and inflate.decompress(inflate.unconsumed_tail, 1)):
            return None
    except IsalError:  # ty: ignore[invalid-exception-caught]
        return None
    return np.frombuffer(raw, dtype=np.uint8).reshape(height, row_bytes) if inflate.eof else None


def _edges(length: int, side: int) -> np.ndarray:
    """[side + 1]: where parts begin; a pixel belongs to the part that holds its centre."""
    return (2 * np.arange(side + 1) * length + side) // (2 * side)
