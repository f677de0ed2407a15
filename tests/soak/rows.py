"""Rows as datasets have them: no image to four, from 200x150 to 1600x1200, in every mode and one that EXIF
turns."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.write.shards import write_dataset
from trainer.data.prompt_stream import PromptStream
from trainer.data.schema import Row, row_id

SIZES = ((200, 150), (400, 300), (320, 640), (800, 600), (1024, 768), (1600, 1200))
MODES = ("RGB", "L", "P", "RGBA", "I;16", "turned")
LARGE = ((1600, 1200), (1024, 768), (800, 600), (200, 150))
"""About 3,000 tokens together at 1,280 per image."""
Shown = tuple[tuple[int, int], str]
"""Size and mode of an image."""
TEXT = "The figure shows a triangle with three angles. "


def image(rng: random.Random, size: tuple[int, int], mode: str) -> bytes:
    """Noise on a gradient, encoded as such images come: JPEG where EXIF turns them, PNG else."""
    width, height = size
    noise = np.random.default_rng(rng.randrange(2**32))
    plane = np.linspace(0, 200, width)[None] + noise.integers(0, 56, (height, 1))
    buffer = io.BytesIO()
    if mode == "I;16":
        Image.fromarray((plane * 257).astype(np.uint16)).save(buffer, "PNG")
        return buffer.getvalue()
    found = Image.fromarray(np.stack([plane, plane[::-1], plane * 0.5], -1).astype(np.uint8))
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = rng.choice((3, 6, 8))
        found.save(buffer, "JPEG", exif=exif)
        return buffer.getvalue()
    found = found.convert(mode)
    if mode == "RGBA":
        found.putalpha(Image.fromarray(plane.astype(np.uint8)))
    found.save(buffer, "PNG")
    return buffer.getvalue()


def row(rng: random.Random, shown: Sequence[Shown], sentences: int = 1) -> Row:
    """A question with these images."""
    images = [image(rng, size, mode) for size, mode in shown]
    text = TEXT * sentences + f"What is {rng.randrange(100)} plus {rng.randrange(100)}?"
    messages = [
        {"role": "user", "content": [*({"type": "image"} for _ in images), {"type": "text", "text": text}]}
    ]
    solution = f"<think>{TEXT * rng.choice((1, 1, 4, 40))}</think><answer>$\\boxed{{1}}$</answer>"
    return Row(row_id("soak", messages, images), "soak", messages, images, "1", "number", solution)


def rows(rng: random.Random, count: int) -> Iterator[Row]:
    """Numbers of images, sizes and modes take turns; every ninth has a long text."""
    for i in range(count):
        shown = [(SIZES[(i + 2 * k) % len(SIZES[:4])], MODES[(i + k) % len(MODES)]) for k in range(i % 5)]
        yield row(rng, shown, sentences=60 if i % 9 == 5 else 1 + i % 3)


def write(out: Path, count: int, per_step: int, seed: int) -> Path:
    """A dataset of `count` training rows and 5 held-out ones; the first step has a prompt of about 3,000
    tokens."""
    rng = random.Random(0)
    train = list(rows(rng, count))
    train[first(1, count, per_step, seed)] = row(
        rng, list(zip(LARGE, ("RGBA", "turned", "P", "L"), strict=True))
    )
    write_dataset(out, "soak", {"train": train, "test": list(rows(rng, 5))}, {})
    return out


def first(step: int, count: int, per_step: int, seed: int) -> int:
    """The row of a step's first prompt, which follows from the run's seed."""
    return PromptStream(range(count), per_step, seed).batch(step)[0].row
