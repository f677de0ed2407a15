"""Gray means of a PNG over a coarse grid: reads it about twice as fast as a general decoder, as nothing else is kept.

What is read here is certainly whole: its stream inflates to the right length with the right checksum, and every row has
a known filter. Anything else, damage included, is left to Pillow, whose verdict counts. Inflation is ISA-L's; the
filters are undone by compiled loops (numba, which vLLM brings along).
"""

from __future__ import annotations

import struct

import numpy as np
from isal import isal_zlib
from isal.igzip_lib import IsalError

try:
    from numba import njit
except ImportError:
    njit = None

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
    if _sum_rows is None or data[:8] != _SIGNATURE or data[12:16] != b"IHDR":
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
    lines = np.zeros((2, width * channels), dtype=np.uint8)
    if not _sum_rows(rows, channels, levels, lines, np.empty(sums.shape[1], dtype=np.uint8), sums):
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


def _compiled(signature: str = ""):
    """Compiles a loop over bytes: with a signature when this module is imported (or takes it from numba's cache), else
    as part of what calls it."""

    def compile_one(function):
        if njit is None:
            return None
        if not signature:
            return njit(function)
        try:
            return njit(signature, cache=True)(function)
        except RuntimeError:  # no folder that the cache could be written to
            return njit(signature)(function)

    return compile_one


@_compiled()
def _paeth(a, b, c):
    """The neighbour (left, above, above left) that is nearest to a + b - c, in few steps (after stb_image)."""
    other = 3 * c - (a + b)
    low, high = min(a, b), max(a, b)
    near = low if high <= other else c
    return high if other <= low else near


@_compiled()
def _undo_sub(x, line, bpp):
    if bpp == 3:
        a0, a1, a2 = np.uint8(0), np.uint8(0), np.uint8(0)
        for i in range(0, len(x) - 2, 3):
            a0, a1, a2 = np.uint8(a0 + x[i]), np.uint8(a1 + x[i + 1]), np.uint8(a2 + x[i + 2])
            line[i], line[i + 1], line[i + 2] = a0, a1, a2
        return
    line[:bpp] = x[:bpp]
    for i in range(bpp, len(x)):
        line[i] = np.uint8(x[i] + line[i - bpp])


@_compiled()
def _undo_up(x, above, line):
    for i in range(len(x)):
        line[i] = np.uint8(x[i] + above[i])


@_compiled()
def _undo_average(x, above, line, bpp):
    for i in range(bpp):
        line[i] = np.uint8(x[i] + (above[i] >> 1))
    for i in range(bpp, len(x)):
        line[i] = np.uint8(x[i] + ((np.int32(line[i - bpp]) + np.int32(above[i])) >> 1))


@_compiled()
def _undo_paeth(x, above, line, bpp):
    """A chain from pixel to pixel, so the three channels that are usual are written out side by side."""
    if bpp == 3:
        a0, a1, a2 = np.int32(0), np.int32(0), np.int32(0)
        c0, c1, c2 = np.int32(0), np.int32(0), np.int32(0)
        for i in range(0, len(x) - 2, 3):
            b0, b1, b2 = np.int32(above[i]), np.int32(above[i + 1]), np.int32(above[i + 2])
            a0 = (_paeth(a0, b0, c0) + x[i]) & 255
            a1 = (_paeth(a1, b1, c1) + x[i + 1]) & 255
            a2 = (_paeth(a2, b2, c2) + x[i + 2]) & 255
            line[i], line[i + 1], line[i + 2] = np.uint8(a0), np.uint8(a1), np.uint8(a2)
            c0, c1, c2 = b0, b1, b2
        return
    for i in range(bpp):
        line[i] = np.uint8(x[i] + above[i])
    for i in range(bpp, len(x)):
        near = _paeth(np.int32(line[i - bpp]), np.int32(above[i]), np.int32(above[i - bpp]))
        line[i] = np.uint8(x[i] + near)


@_compiled()
def _on_white(line, channels, colors):
    """Pixels of 2 or 4 channels, the last one alpha, on white."""
    kept = channels - 1
    for pixel in range(len(line) // channels):
        alpha = np.int32(line[channels * pixel + kept])
        for k in range(kept):
            colors[kept * pixel + k] = np.uint8(255 - ((255 - line[channels * pixel + k]) * alpha + 127) // 255)


@_compiled()
def _add(line, total):
    for i in range(len(line)):
        total[i] += line[i]


@_compiled("b1(Array(u1, 2, 'C', readonly=True), i8, u1[::1], u1[:, ::1], u1[::1], u4[:, ::1])")
def _sum_rows(rows, channels, levels, lines, colors, sums):
    """Undoes the filters row by row and adds the rows of each part up. False for an unknown filter.

    Only two rows are kept, which stay in the processor's first cache.

    Args:
        rows: [height, 1 + bytes], the filter's number first.
        channels: bytes of a pixel.
        levels: gray levels of the palette, or empty.
        lines: [2, bytes] of zeros: this row and the one above.
        colors: room for a row as it is summed.
        sums: [side, width * colors] of zeros.
    """
    side, height = sums.shape[0], rows.shape[0]
    for part in range(side):
        for y in range((2 * part * height + side) // (2 * side), (2 * (part + 1) * height + side) // (2 * side)):
            kind, x, line, above = rows[y, 0], rows[y, 1:], lines[y & 1], lines[1 - (y & 1)]
            if kind == 0:
                line[:] = x
            elif kind == 1:
                _undo_sub(x, line, channels)
            elif kind == 2:
                _undo_up(x, above, line)
            elif kind == 3:
                _undo_average(x, above, line, channels)
            elif kind == 4:
                _undo_paeth(x, above, line, channels)
            else:
                return False
            if len(levels):
                for i in range(len(line)):
                    colors[i] = levels[line[i]]
                _add(colors, sums[part])
            elif channels == 2 or channels == 4:
                _on_white(line, channels, colors)
                _add(colors, sums[part])
            else:
                _add(line, sums[part])
    return True
