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
"""By the header's color type: gray, RGB, palette, gray and alpha, RGBA."""
_TO_GRAY = np.array([19595, 38470, 7471], dtype=np.int32)
"""Of red, green and blue, in 65536ths: Pillow's."""


def gray_means(data: bytes, side: int) -> np.ndarray | None:
    """Mean levels of the side x side parts of a picture, transparent pixels white. None: let Pillow read it.

    Returns [side, side] float32, within a level of what Pillow's conversion to L and its box filter give.
    """
    if _undo is None or data[:8] != _SIGNATURE or data[12:16] != b"IHDR":
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
    if rows is None or not _undo(rows, channels):
        return None
    levels = _over_white(rows[:, 1:].reshape(height, width, channels)) if channels in (2, 4) else rows[:, 1:]
    if chunks[1] is not None:
        levels = chunks[1][levels]
    sums = np.zeros((side, width * (3 if color in (2, 6) else 1)), dtype=np.uint32)
    _sum_rows(levels, sums)
    gray = sums.reshape(side, width, 3) @ (_TO_GRAY / 65536) if color in (2, 6) else sums.astype(np.float64)
    edges_y, edges_x = _edges(height, side), _edges(width, side)
    parts = np.add.reduceat(gray, edges_x[:-1], axis=1)
    return (parts / np.outer(np.diff(edges_y), np.diff(edges_x))).astype(np.float32)


def _over_white(pixels: np.ndarray) -> np.ndarray:
    """Pixels with alpha [height, width, 2 or 4] on white, as rows [height, width * (1 or 3)]."""
    alpha = pixels[:, :, -1:].astype(np.uint16)
    white = 255 - ((255 - pixels[:, :, :-1]) * alpha + 127) // 255
    return white.astype(np.uint8).reshape(len(pixels), -1)


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
    return np.frombuffer(bytearray(raw), dtype=np.uint8).reshape(height, row_bytes) if inflate.eof else None


def _edges(length: int, side: int) -> np.ndarray:
    """[side + 1]: where parts begin; a pixel belongs to the part that holds its centre."""
    return (2 * np.arange(side + 1) * length + side) // (2 * side)


def _compiled(signature: str):
    """Compiles a loop over bytes when this module is imported, or takes it from numba's cache."""

    def compile_one(function):
        if njit is None:
            return None
        try:
            return njit(signature, cache=True)(function)
        except RuntimeError:  # no folder that the cache could be written to
            return njit(signature)(function)

    return compile_one


@_compiled("i4(i4, i4, i4)")
def _paeth(a, b, c):
    """The neighbour (left, above, above left) that is nearest to a + b - c."""
    x, y = b - c, a - c
    near_a, near_b, near_c = abs(x), abs(y), abs(x + y)
    c_is_nearer = (near_c - near_b) >> 31  # all ones or zero: what the nearest is, is too random to branch on
    other, near = b ^ ((b ^ c) & c_is_nearer), near_b ^ ((near_b ^ near_c) & c_is_nearer)
    return a ^ ((a ^ other) & ((near - near_a) >> 31))


@_compiled("b1(u1[:, ::1], i8)")
def _undo(rows, bytes_per_pixel):
    """Undoes the filters in place: rows [height, 1 + bytes], the filter's number first. False for an unknown filter.

    Paeth's rule is a chain from pixel to pixel, so three or four channels are written out side by side.
    """
    bpp = bytes_per_pixel
    size = rows.shape[1]
    for y in range(rows.shape[0]):
        row = rows[y]
        kind = row[0]
        if kind > 4:
            return False
        if kind == 1 or (kind == 4 and y == 0):
            for i in range(bpp + 1, size):
                row[i] = np.uint8(row[i] + row[i - bpp])
        elif kind == 2 and y > 0:
            above = rows[y - 1]
            for i in range(1, size):
                row[i] = np.uint8(row[i] + above[i])
        elif kind == 3:
            for i in range(1, size):
                left = np.int32(row[i - bpp]) if i > bpp else np.int32(0)
                up = np.int32(rows[y - 1, i]) if y > 0 else np.int32(0)
                row[i] = np.uint8(row[i] + ((left + up) >> 1))
        elif kind == 4:
            above = rows[y - 1]
            for i in range(1, bpp + 1):
                row[i] = np.uint8(row[i] + above[i])
            if bpp >= 3:
                a0, a1, a2, a3 = np.int32(row[1]), np.int32(row[2]), np.int32(row[3]), np.int32(row[bpp])
                c0, c1, c2, c3 = np.int32(above[1]), np.int32(above[2]), np.int32(above[3]), np.int32(above[bpp])
                for i in range(bpp + 1, size, bpp):
                    b0, b1, b2 = np.int32(above[i]), np.int32(above[i + 1]), np.int32(above[i + 2])
                    a0 = (_paeth(a0, b0, c0) + row[i]) & 255
                    a1 = (_paeth(a1, b1, c1) + row[i + 1]) & 255
                    a2 = (_paeth(a2, b2, c2) + row[i + 2]) & 255
                    row[i], row[i + 1], row[i + 2] = np.uint8(a0), np.uint8(a1), np.uint8(a2)
                    c0, c1, c2 = b0, b1, b2
                    if bpp == 4:
                        b3 = np.int32(above[i + 3])
                        a3 = (_paeth(a3, b3, c3) + row[i + 3]) & 255
                        row[i + 3] = np.uint8(a3)
                        c3 = b3
            else:
                for i in range(bpp + 1, size):
                    near = _paeth(np.int32(row[i - bpp]), np.int32(above[i]), np.int32(above[i - bpp]))
                    row[i] = np.uint8(near + row[i])
    return True


@_compiled("void(u1[:, :], u4[:, ::1])")
def _sum_rows(rows, sums):
    """Adds rows [height, bytes] up within each of the parts in sums [side, bytes]."""
    side, height = sums.shape[0], rows.shape[0]
    for part in range(side):
        total = sums[part]
        for y in range((2 * part * height + side) // (2 * side), (2 * (part + 1) * height + side) // (2 * side)):
            row = rows[y]
            for i in range(total.shape[0]):
                total[i] += row[i]
