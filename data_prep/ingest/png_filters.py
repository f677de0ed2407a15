"""PNG's filters undone and the rows summed, compiled by numba, which vLLM brings along.

Paeth's filter is a chain from pixel to pixel and to the row above. So a pixel is computed as one vector of its
channels, and four rows at a time, each a pixel behind the one above it: four chains keep the processor busy where one
would leave it waiting (2.0 GB/s of rows against 0.6, measured).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINES = 5
"""Rows that are kept: the one above, and four of Paeth's filter that are undone at a time."""
SPARE = 4
"""Bytes past a kept row that may be read and written: a pixel moves as four bytes, also one of three."""
_BYTES, _WORDS = ir.VectorType(ir.IntType(8), 4), ir.VectorType(ir.IntType(16), 4)


def _build_load(typing_context, row, at):
    """Four bytes of a row as four 16-bit words, which numba carries as one uint64."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        bytes_ = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), _BYTES.as_pointer()), align=1)
        return builder.bitcast(builder.zext(bytes_, _WORDS), ir.IntType(64))

    return types.uint64(row, types.int64), build


def _build_store(typing_context, row, at, pixel):
    """The reverse of `_build_load`."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        bytes_ = builder.trunc(builder.bitcast(arguments[2], _WORDS), _BYTES)
        builder.store(bytes_, builder.bitcast(builder.gep(data, [arguments[1]]), _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(row, types.int64, types.uint64), build


def _build_unpaeth(typing_context, x, a, b, c):
    """x plus that of a, b, c (left, above, above left) which is nearest to a + b - c; by stb_image's formula."""

    def build(context, builder, signature, arguments):
        x, a, b, c = (builder.bitcast(word, _WORDS) for word in arguments)
        other = builder.sub(builder.sub(builder.mul(c, ir.Constant(_WORDS, [3] * 4)), b), a)
        less = builder.icmp_signed("<", a, b)
        low, high = builder.select(less, a, b), builder.select(less, b, a)
        near = builder.select(builder.icmp_signed("<=", high, other), low, c)
        near = builder.select(builder.icmp_signed("<=", other, low), high, near)
        return builder.bitcast(builder.and_(builder.add(near, x), ir.Constant(_WORDS, [255] * 4)), ir.IntType(64))

    return types.uint64(*[types.uint64] * 4), build


_load: Any = intrinsic(_build_load)
_store: Any = intrinsic(_build_store)
_unpaeth: Any = intrinsic(_build_unpaeth)


@njit
def _undo_sub(x, line, bpp):
    if bpp == 3:
        a0, a1, a2 = np.uint8(0), np.uint8(0), np.uint8(0)
        for i in range(0, len(x) - 2, 3):
            a0, a1, a2 = np.uint8(a0 + x[i]), np.uint8(a1 + x[i + 1]), np.uint8(a2 + x[i + 2])
            line[i], line[i + 1], line[i + 2] = a0, a1, a2
        return
    for i in range(bpp):
        line[i] = x[i]
    for i in range(bpp, len(x)):
        line[i] = np.uint8(x[i] + line[i - bpp])


@njit
def _undo_up(x, above, line):
    for i in range(len(x)):
        line[i] = np.uint8(x[i] + above[i])


@njit
def _undo_average(x, above, line, bpp):
    for i in range(bpp):
        line[i] = np.uint8(x[i] + (above[i] >> 1))
    for i in range(bpp, len(x)):
        line[i] = np.uint8(x[i] + ((np.int32(line[i - bpp]) + np.int32(above[i])) >> 1))


@njit
def _undo_paeth(x, above, line, bpp):
    if bpp >= 3:
        a = c = np.uint64(0)
        for i in range(0, len(x), bpp):
            b = _load(above, i)
            a = _unpaeth(_load(x, i), a, b, c)
            _store(line, i, a)
            c = b
        return
    for i in range(bpp):
        line[i] = np.uint8(x[i] + above[i])
    for i in range(bpp, len(x)):
        a, b, c = np.int32(line[i - bpp]), np.int32(above[i]), np.int32(above[i - bpp])
        other, low, high = 3 * c - (a + b), min(a, b), max(a, b)
        near = high if other <= low else (low if high <= other else c)
        line[i] = np.uint8(x[i] + near)


@njit
def _undo_four_paeth(rows, y, lines, last, bpp):
    """Rows y to y + 3, below lines[last], into the four lines that follow it."""
    x0, x1, x2, x3 = rows[y, 1:], rows[y + 1, 1:], rows[y + 2, 1:], rows[y + 3, 1:]
    above, line0, line1 = lines[last], lines[(last + 1) % LINES], lines[(last + 2) % LINES]
    line2, line3 = lines[(last + 3) % LINES], lines[(last + 4) % LINES]
    a0 = a1 = a2 = a3 = np.uint64(0)  # of each row the pixel to the left: what the row below has above it
    c0 = c1 = c2 = c3 = np.uint64(0)
    n = len(x0)
    for i in range(0, n + 3 * bpp, bpp):
        at = i - 3 * bpp  # the lowest row first, as it needs what the others had before this step
        if at >= 0:
            pixel = _unpaeth(_load(x3, at), a3, a2, c3)
            c3, a3 = a2, pixel
            _store(line3, at, pixel)
        at += bpp
        if 0 <= at < n:
            pixel = _unpaeth(_load(x2, at), a2, a1, c2)
            c2, a2 = a1, pixel
            _store(line2, at, pixel)
        at += bpp
        if 0 <= at < n:
            pixel = _unpaeth(_load(x1, at), a1, a0, c1)
            c1, a1 = a0, pixel
            _store(line1, at, pixel)
        if i < n:
            b = _load(above, i)
            pixel = _unpaeth(_load(x0, i), a0, b, c0)
            c0, a0 = b, pixel
            _store(line0, i, pixel)


@njit
def _on_white(line, channels, colors):
    """Pixels of 2 or 4 channels, the last one alpha, on white."""
    kept = channels - 1
    for pixel in range(len(line) // channels):
        alpha = np.int32(line[channels * pixel + kept])
        for k in range(kept):
            colors[kept * pixel + k] = np.uint8(255 - ((255 - line[channels * pixel + k]) * alpha + 127) // 255)


@njit
def _add(line, total):
    for i in range(len(line)):
        total[i] += line[i]


def _sum_rows(rows, channels, levels, lines, colors, sums):
    """Undoes the filters and adds the rows of each part of the picture up. False for an unknown filter.

    Only LINES rows are kept, which stay in the processor's first cache.

    Args:
        rows: [height, 1 + width * channels], the filter's number first; one byte after them can be read, as in `bytes`.
        channels: bytes of a pixel.
        levels: gray levels of the palette, or empty.
        lines: [LINES, width * channels + SPARE] of zeros: room for rows.
        colors: room for a row as it is summed.
        sums: [side, width * colors] of zeros.
    """
    side, height, size = sums.shape[0], rows.shape[0], rows.shape[1] - 1
    y = part = last = 0
    while y < height:
        kind, x, above, line = rows[y, 0], rows[y, 1:], lines[last, :size], lines[(last + 1) % LINES, :size]
        done = 1
        if kind == 0:
            line[:] = x
        elif kind == 1:
            _undo_sub(x, line, channels)
        elif kind == 2:
            _undo_up(x, above, line)
        elif kind == 3:
            _undo_average(x, above, line, channels)
        elif kind == 4:
            four = channels >= 3 and y + 3 < height
            if four and rows[y + 1, 0] == 4 and rows[y + 2, 0] == 4 and rows[y + 3, 0] == 4:
                _undo_four_paeth(rows, y, lines, last, channels)
                done = 4
            else:
                _undo_paeth(x, above, line, channels)
        else:
            return False
        for _ in range(done):
            last = (last + 1) % LINES
            line = lines[last, :size]
            while y >= (2 * (part + 1) * height + side) // (2 * side):
                part += 1
            if len(levels):
                for i in range(size):
                    colors[i] = levels[line[i]]
                _add(colors, sums[part])
            elif channels == 2 or channels == 4:
                _on_white(line, channels, colors)
                _add(colors, sums[part])
            else:
                _add(line, sums[part])
            y += 1
    return True


_signature = "b1(Array(u1, 2, 'C', readonly=True), i8, u1[::1], u1[:, ::1], u1[::1], u4[:, ::1])"
try:
    sum_rows = njit(_signature, cache=True)(_sum_rows)
except RuntimeError:  # no folder that the cache could be written to
    sum_rows = njit(_signature)(_sum_rows)
