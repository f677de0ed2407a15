"""Memory and processor time of data preparation by the number of rows, through the command line.

    python -m benchmarks.prepare_data_scale [--rows 15000 30000 60000] [--out FILE]

Every row has an image of its own, 64 x 48 pixels, and a question of a sentence. `distinct`: no two images are
alike. `look-alikes`: all of them are one drawing with another pixel changed in each, the worst case of the
search for near-identical images: one family of as many members as there are rows. Memory is the largest sum
of proportional shares (PSS) of the command and its children, sampled every 0.1 s, which takes a part of a
core; CPU seconds likewise.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.prepare_data import watch
from trainer.data.dataset import read_manifest

WIDTH, HEIGHT = 64, 48


def distinct(number: int) -> Image.Image:
    """Blocks of random gray."""
    blocks = np.random.default_rng(number).integers(0, 256, (6, 8), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(8, axis=0).repeat(8, axis=1))


def look_alike(number: int) -> Image.Image:
    """Always the same blocks; `number` is written into the lowest bits of the pixels of the first lines."""
    levels = np.asarray(distinct(0)).copy().reshape(-1)
    levels[:32] ^= np.array([number >> bit & 1 for bit in range(32)], dtype=np.uint8)
    return Image.fromarray(levels.reshape(HEIGHT, WIDTH))


KINDS: dict[str, Callable[[int], Image.Image]] = {"distinct": distinct, "look-alikes": look_alike}


def make(folder: Path, rows: int, draw: Callable[[int], Image.Image]) -> None:
    """Writes `rows.jsonl` and `images.zip`."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "images.zip", "w") as archive, open(folder / "rows.jsonl", "w") as table:
        for number in range(rows):
            data = io.BytesIO()
            draw(number).save(data, "PNG")
            archive.writestr(f"images/{number}.png", data.getvalue())
            asked = f"Number {number}: how many of the blocks in the image are darker than their neighbors?"
            table.write(
                json.dumps({"question": asked, "answer": number, "image": f"images/{number}.png"}) + "\n"
            )


def measure(folder: Path, rows: int, kind: str) -> dict[str, Any]:
    """Prepares one set. Every row must be in the result."""
    make(folder / "raw", rows, KINDS[kind])
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "prepare",
        str(folder / "raw"),
        "--out",
        str(folder / "out"),
    ]
    _, peak_mib, cpu_s = watch(command)
    manifest = read_manifest(folder / "out")
    if sum(manifest.rows.values()) != rows:
        raise SystemExit(f"{kind}, {rows} rows: {manifest.rows} written, left out {manifest.quarantined}")
    groups = (manifest.statistics or {})["groups"]
    return {
        "rows": manifest.rows,
        "groups": groups["count"],
        "largest_group": groups["largest"],
        "peak_mib": round(peak_mib, 1),
        "cpu_s": round(cpu_s, 1),
    }


def main() -> None:
    """Measures every kind and size, and writes the figures."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, nargs="+", default=[15_000, 30_000, 60_000])
    options.add_argument("--out", default="benchmarks/prepare_data_scale.json")
    args = options.parse_args()
    result: dict[str, Any] = {
        "machine": (
            f"{len(os.sched_getaffinity(0))} cores {platform.machine()}, python {platform.python_version()}"
        ),
        "image": f"{WIDTH} x {HEIGHT} pixels, PNG, one a row",
    }
    for kind in KINDS:
        result[kind] = {}
        for rows in args.rows:
            with tempfile.TemporaryDirectory(prefix="prepare-scale-") as name:
                result[kind][f"{rows} rows"] = measure(Path(name), rows, kind)
            print(kind, rows, result[kind][f"{rows} rows"], file=sys.stderr)
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
