import io
import os
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.ingest import images, png
from data_prep.ingest.images import ImageLimits, inspect
from tests.data_prep.raw import drawing

pytest.importorskip("numba")
SIDE = images.LOOK_SIDE


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encoded(
    levels: np.ndarray, color: int, filters, palette: np.ndarray | None = None, parts: int = 1, more_rows: int = 0
) -> bytes:
    """A PNG of uint8 [height, width, channels] whose rows use these filters in turn; written here, filter by filter."""
    height, width, channels = levels.shape
    flat = levels.reshape(height, -1).astype(np.int32)
    rows = []
    for y in range(height):
        left = np.pad(flat[y], (channels, 0))[: flat.shape[1]]
        up = flat[y - 1] if y else np.zeros_like(flat[y])
        corner = np.pad(up, (channels, 0))[: flat.shape[1]]
        guess = left + up - corner
        near = np.stack([abs(guess - left), abs(guess - up), abs(guess - corner)])
        paeth = np.choose(near.argmin(axis=0), [left, up, corner])
        kind = filters[y % len(filters)]
        predicted = [np.zeros_like(left), left, up, (left + up) // 2, paeth][kind]
        rows.append(bytes([kind]) + ((flat[y] - predicted) % 256).astype(np.uint8).tobytes())
    stream = zlib.compress(b"".join(rows))
    cuts = [len(stream) * i // parts for i in range(parts + 1)]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height + more_rows, 8, color, 0, 0, 0))
    extra = chunk(b"PLTE", palette.astype(np.uint8).tobytes()) if palette is not None else b""
    data = b"".join(chunk(b"IDAT", stream[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    return b"\x89PNG\r\n\x1a\n" + header + extra + data + chunk(b"IEND", b"")


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        if image.mode in ("RGBA", "LA"):
            rgba = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
        gray = image.convert("L").convert("F").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(gray, dtype=np.float32)


@pytest.mark.parametrize(
    "filters",
    [[0], [1], [2], [3], [4], [4, 3, 2, 1, 0, 3, 4, 4], [0, 1, 2, 3, 4], [4, 4, 4, 4, 4, 1], [2, 4, 4, 4, 4]],
)
@pytest.mark.parametrize(("color", "channels"), [(0, 1), (2, 3), (3, 1), (4, 2), (6, 4)])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (57, 31), (100, 203)])
def test_means_are_those_of_pillow(color, channels, filters, height, width):
    rng = np.random.default_rng(height + channels)
    smooth = np.cumsum(rng.integers(-9, 10, (height, width, channels)), axis=1)
    levels = (smooth + rng.integers(0, 3, smooth.shape)).astype(np.uint8)
    palette = rng.integers(0, 256, (256, 3)) if color == 3 else None
    data = encoded(levels, color, filters, palette, parts=1 + width % 3)
    found = png.gray_means(data, SIDE)
    assert found is not None
    assert np.abs(found - by_pillow(data)).max() < {1: 0.01, 2: 1.5, 3: 0.7, 4: 1.5}[channels]


def test_facts_are_those_of_the_slow_way():
    for seed in range(5):
        buffer = io.BytesIO()
        drawing(seed, 300, 200).save(buffer, "PNG")
        fast, slow = (inspect(buffer.getvalue(), ImageLimits(), fast_png=fast) for fast in (True, False))
        levels = [np.frombuffer(bytes.fromhex(picture.look), np.uint8).astype(int) for picture in (fast, slow)]
        assert replace(fast, look="") == replace(slow, look="")
        assert np.abs(levels[0] - levels[1]).max() <= 5 < images.NEAR_LEVELS / 5


def damaged() -> dict[str, bytes]:
    good = encoded(np.full((40, 40, 3), 7, np.uint8), 2, [4])
    start = good.index(b"IDAT") + 4
    stream = zlib.compress(b"\x05" + b"\0" * 120 + b"\0" * 121 * 39)
    unknown_filter = good[: start - 8] + chunk(b"IDAT", stream) + chunk(b"IEND", b"")
    return {
        "truncated": good[: start + 10],
        "bit flipped": good[: start + 8] + bytes([good[start + 8] ^ 16]) + good[start + 9 :],
        "too few rows": encoded(np.full((40, 40, 3), 7, np.uint8), 2, [4], more_rows=1),
        "too many rows": encoded(np.full((40, 40, 3), 7, np.uint8), 2, [4], more_rows=-1),
        "unknown filter": unknown_filter,
        "long palette": encoded(np.zeros((40, 40, 1), np.uint8), 3, [0], np.zeros((300, 3))),
        "no data": good[: start - 8],
        "header only": good[:20],
    }


@pytest.mark.parametrize("name", list(damaged()))
def test_damage_is_left_to_pillow(name):
    data = damaged()[name]
    try:
        assert png.gray_means(data, SIDE) is None
    except struct.error:
        assert name == "header only"
    assert inspect(data, ImageLimits(), fast_png=True) == inspect(data, ImageLimits())


@pytest.mark.parametrize("mode", ["1", "I;16", "P"])
def test_other_kinds_are_left_to_pillow(mode):
    buffer = io.BytesIO()
    image = Image.new("L", (50, 50), 9).convert(mode)
    image.save(buffer, "PNG", **({"transparency": 0} if mode == "P" else {}))
    assert png.gray_means(buffer.getvalue(), SIDE) is None


def test_huge_pictures_are_left_to_pillow():
    buffer = io.BytesIO()
    Image.new("L", (5000, 4000), 9).save(buffer, "PNG")
    assert png.gray_means(buffer.getvalue(), SIDE) is None


def test_a_numba_that_fails_costs_time_and_no_picture(tmp_path):
    """Else every PNG would be called damaged, or the process that the workers are forked from would die."""
    (tmp_path / "numba.py").write_text("raise RuntimeError('no such instruction')")
    script = (
        "import sys; from data_prep.ingest.images import ImageLimits, inspect; "
        "p = inspect(sys.stdin.buffer.read(), ImageLimits(), fast_png=True); print(p.format, p.error or 'fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=encoded(np.asarray(drawing(3)), 2, [4]),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
    )
    assert done.stdout.decode().split() == ["PNG", "fine"], done.stderr
    assert b"PNG is read by Pillow" in done.stderr and b"no such instruction" in done.stderr
