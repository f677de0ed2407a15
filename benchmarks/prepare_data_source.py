"""An archive and rows like MathV60K's, for `prepare_data.py`: drawn, since the real one is 2.4 GB away.

Shares are those of its rows by source (paper of LMM-R1, arXiv 2503.07536, table A4; sets below one percent
are left out or joined to the nearest). File types and sizes in pixels are those usual in each set: about a
quarter are JPEG photographs, the others PNG charts, drawings, tables, renderings and scanned pages. Rows
share images as there: 65,118 rows on about 40,000 images.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

FOREIGN = "/apdcephfs_gy2/share_302735770/berlinni/zgr/data/mathv60k/"
PICTURES_PER_ROW = 40_000 / 65_118


@dataclass(frozen=True)
class Kind:
    """Images of one source set."""

    name: str
    rows: int
    """Its share of 65,118 rows."""
    draw: Callable[[np.random.Generator, int, int], Image.Image]
    width: tuple[int, int]
    height: tuple[int, int]
    format: str = "PNG"


def photo(rng: np.random.Generator, width: int, height: int, noise: float = 6.0) -> Image.Image:
    """Soft shapes with detail and grain."""
    levels = np.zeros((height, width, 3), dtype=np.float32)
    for cell, weight in ((160, 0.6), (40, 0.3), (10, 0.1)):
        coarse = rng.integers(0, 255, (height // cell + 2, width // cell + 2, 3), dtype=np.uint8)
        soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        levels += weight * np.asarray(soft, dtype=np.float32)
    levels += rng.normal(0, noise, (height, width, 1)).astype(np.float32)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def rendering(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A few shaded solids on a soft ground, with the faint grain of a renderer."""
    image = photo(rng, width, height, noise=1.0).resize((width // 8, height // 8)).resize((width, height))
    pen = ImageDraw.Draw(image)
    for _ in range(8):
        x = int(rng.integers(width))
        y = int(rng.integers(height))
        r = int(rng.integers(15, 60))
        pen.ellipse((x, y, x + r, y + r), fill=tuple(int(v) for v in rng.integers(0, 255, 3)))
    levels = np.asarray(image, dtype=np.float32) + rng.normal(0, 0.3, (height, width, 1))
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def chart(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Bars, a curve and labels, anti-aliased."""
    image = Image.new("RGB", (2 * width, 2 * height), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    bars = int(rng.integers(4, 14))
    for i in range(bars):
        top, shade = (
            int(rng.integers(height // 5, 2 * height - 40)),
            tuple(int(v) for v in rng.integers(0, 255, 3)),
        )
        left = 2 * (i + 1) * width // (bars + 2)
        pen.rectangle((left, top, left + width // bars, 2 * height - 30), fill=shade)
        pen.line((0, top, 2 * width, top), fill=(220, 220, 220))
    curve = np.cumsum(rng.normal(0, height / 20, 60)) + height
    pen.line([(i * width / 30, float(y)) for i, y in enumerate(curve)], fill=(200, 30, 30), width=4)
    image = image.resize((width, height), Image.Resampling.BOX)
    labels = ImageDraw.Draw(image)
    for i in range(bars):
        labels.text(
            ((i + 1) * width // (bars + 2), height - 14),
            f"item {rng.integers(10_000)}",
            fill=(0, 0, 0),
            font_size=11,
        )
        labels.text(
            (2, (i + 1) * height // (bars + 2)), f"{rng.integers(100_000)}", fill=(0, 0, 0), font_size=11
        )
    labels.text((width // 3, 4), f"Sales of {rng.integers(1_000_000)}", fill=(0, 0, 0), font_size=16)
    return image


def drawing(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Thin lines, a circle and letters, anti-aliased."""
    image = Image.new("RGB", (2 * width, 2 * height), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    points = [(int(rng.integers(2 * width)), int(rng.integers(2 * height))) for _ in range(6)]
    for start, end in zip(points, points[1:], strict=False):
        pen.line((*start, *end), fill=(0, 0, 0), width=3)
    x = int(rng.integers(width))
    y = int(rng.integers(height))
    r = int(rng.integers(20, max(21, height)))
    pen.ellipse((x, y, x + r, y + r), outline=(0, 0, 0), width=3)
    image = image.resize((width, height), Image.Resampling.BOX)
    labels = ImageDraw.Draw(image)
    for letter, (px, py) in zip("ABCDEF", points, strict=True):
        labels.text((px // 2, py // 2), letter, fill=(0, 0, 0))
    return image


def icons(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """One shaded disc many times over, as RGBA."""
    size = max(24, width // 7)
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    disc = np.empty((size, size, 4), dtype=np.uint8)
    disc[..., :3] = (rng.integers(0, 200, 3) * (1.2 - (x + y)[..., None])).clip(0, 255)
    disc[..., 3] = ((0.5 - np.hypot(x, y)) * size).clip(0, 1) * 255
    image, icon = Image.new("RGBA", (width, height), (255, 255, 255, 0)), Image.fromarray(disc)
    for left in range(0, width - size, size + 4):
        for top in range(0, height - size, size + 4):
            image.paste(icon, (left, top))
    return image


def table(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Ruled lines and words."""
    image = Image.new("RGB", (width, height), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for y in range(4, height - 12, 18):
        pen.text((6, y), f"row {rng.integers(10_000)}", fill=(20, 20, 60))
        pen.text((width // 2, y), f"{rng.integers(1_000_000) / 100:.2f}", fill=(20, 20, 60))
        pen.line((0, y + 15, width, y + 15), fill=(120, 140, 220))
    return image


def scan(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A page of text with the specks of a scanner."""
    image = Image.new("L", (width, height), 250)
    pen = ImageDraw.Draw(image)
    words = ["amount", "total", "of the", "date", "1987", "net sales", "per cent", "company", "to", "receipt"]
    for y in range(80, height - 80, 32):
        pen.text(
            (80, y),
            " ".join(words[i] for i in rng.integers(0, len(words), width // 120)),
            fill=30,
            font_size=24,
        )
    levels = np.asarray(image).copy()
    specks = rng.integers(0, levels.size, levels.size // 90)
    levels.reshape(-1)[specks] = rng.integers(200, 255, len(specks))
    return Image.fromarray(levels).convert("RGB")


KINDS = (
    Kind("IconQA", 7166, icons, (200, 500), (100, 300)),
    Kind("PMC-VQA", 6760, photo, (400, 740), (300, 600), "JPEG"),
    Kind("TabMWP", 6732, table, (200, 450), (120, 300)),
    Kind("A-OKVQA", 6185 + 1316, photo, (480, 640), (426, 640), "JPEG"),  # and VQA2.0: the same photographs
    Kind("FigureQA", 4995, chart, (400, 700), (300, 500)),
    Kind("ScienceQA", 4243, rendering, (200, 400), (150, 300)),
    Kind("GeoQA+", 4062 + 2767 + 129, drawing, (120, 350), (90, 250)),  # and UniGeo, GEOS
    Kind("DVQA", 3317, chart, (448, 448), (448, 448)),
    Kind("Geometry3K", 2845, drawing, (250, 700), (200, 550)),
    Kind("AI2D", 2603 + 2130, rendering, (300, 500), (250, 400)),  # and TQA
    Kind("CLEVR-Math", 2393, rendering, (480, 480), (320, 320)),
    Kind("DocVQA", 1974, scan, (1600, 1750), (2100, 2250)),
    Kind("TextVQA", 1462 + 204, photo, (768, 1024), (683, 1024), "JPEG"),  # and VizWiz
    Kind("ChartQA", 1115, chart, (700, 850), (400, 800)),
    Kind("PlotQA", 1020, chart, (650, 1100), (600, 700)),
    Kind("Super-CLEVR", 1016 + 404, rendering, (640, 640), (480, 480)),  # and VQA-AS
)


def draw(number: int) -> tuple[str, bytes]:
    """(name in the archive, encoded image): always the same for the same number."""
    rng = np.random.default_rng(number)
    weights = np.array([kind.rows for kind in KINDS], dtype=float)
    kind = KINDS[rng.choice(len(KINDS), p=weights / weights.sum())]
    width, height = (int(rng.integers(low, high + 1)) for low, high in (kind.width, kind.height))
    buffer = io.BytesIO()
    kind.draw(rng, width, height).save(
        buffer, kind.format, **({"quality": 88} if kind.format == "JPEG" else {})
    )
    ending = "jpg" if kind.format == "JPEG" else "png"
    return f"mathv60k_img/{kind.name}/images/{number}.{ending}", buffer.getvalue()


def make(folder: Path, rows: int) -> dict[str, Any]:
    """Writes the archive (gzip, as published) and the rows, slashes escaped as pandas does. Returns what they
    hold.

    What is there already is used again.
    """
    noted = folder / "source.json"
    if noted.exists():
        return json.loads(noted.read_text())
    folder.mkdir(parents=True)
    rng = random.Random(0)
    names = []
    kinds = Counter()
    sizes = []
    with (
        tarfile.open(folder / "mathv60k_img.tar.gz", "w:gz", compresslevel=6) as tar,
        ProcessPoolExecutor() as pool,
    ):
        for name, data in pool.map(draw, range(round(rows * PICTURES_PER_ROW)), chunksize=16):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            names.append(name)
            sizes.append(len(data))
            kinds[name.rpartition(".")[2]] += len(data)
    with open(folder / "mathv60k_message.jsonl", "w") as file:
        for i in range(rows):
            file.write(row(i, names[i % len(names)], rng) + "\n")
    count = Counter(name.rpartition(".")[2] for name in names)
    held = {
        "about": "drawn after MathV60K's 24 sources: their shares of the rows, usual file types and sizes",
        "rows": rows,
        "images": len(names),
        "by_type": {
            kind: {"images": count[kind], "mb": round(kinds[kind] / 1e6, 1)} for kind in sorted(count)
        },
        "image_kb": {
            "mean": round(sum(sizes) / len(sizes) / 1e3, 1),
            "median": round(sorted(sizes)[len(sizes) // 2] / 1e3, 1),
        },
        "archive_mb": round((folder / "mathv60k_img.tar.gz").stat().st_size / 1e6, 1),
    }
    noted.write_text(json.dumps(held))
    return held


def row(number: int, image: str, rng: random.Random) -> str:
    """One line of the jsonl."""
    content = [
        {"type": "text", "text": f"Question {number}? " + "words " * rng.randrange(10, 60)},
        {"type": "image", "image": FOREIGN + image},
    ]
    system = {"role": "system", "content": "Solve the question. " * 20}
    message = json.dumps([system, {"role": "user", "content": content}]).replace("/", "\\/")
    answer = rng.choice([rng.choice("ABCD"), str(rng.randrange(1000)), f"{rng.random():.2f}"])
    return json.dumps(
        {"question": content[0]["text"], "answer": f"$\\boxed{{{answer}}}$", "message": message}
    )
