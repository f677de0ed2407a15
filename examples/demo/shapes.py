"""A synthetic visual-math set in MathV60K's raw format: small images, questions with letter and number
answers.

    shapes_message.jsonl    one row per line: question, answer (`$\\boxed{3}$`), message (a JSON list as a
                            string), and `solution`: a worked solution for supervised training
    shapes_img.tar.gz       the images, under shapes_img/

Every row is a pure function of (seed, split, index), so any prefix of a split is stable. No question can be
answered from its text: within a kind, all answers are equally likely. Train and test never share a (question,
image) pair.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from data_prep.prepare import prepare as convert
from data_prep.sources.own_files import Given, own
from trainer.data.schema import Manifest

SYSTEM_PROMPT = "Think first, then answer in a box."
"""Short, because on a CPU prompt tokens dominate the time of a tiny model."""

COLORS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 70, 220), "black": (20, 20, 20)}
ANGLES = (30, 60, 90, 120, 150)
COUNTS = tuple("123456")
SUMS = tuple("012345678")
LETTERS = tuple("ABC")
SLIPS = 0.6
"""Share of the warm split's solutions whose result is wrong."""
SEGMENTS = {0: "abcdef", 1: "bc", 2: "abged", 3: "abgcd", 4: "fgbc", 5: "afgcd", 6: "afgedc", 7: "abc",
            8: "abcdefg", 9: "abcdfg"}  # fmt: skip
"""Lit segments of a seven-segment digit; drawn by hand, so that no font file decides what the image is."""


@dataclass(frozen=True)
class Example:
    """One question with its image."""

    kind: str
    question: str
    think: str
    """Reasoning of the worked solution, before the result."""
    answer: str
    choices: tuple[str, ...]
    """All answers that its kind can have, equally likely."""
    image: Image.Image

    @property
    def solution(self) -> str:
        return f"<think>{self.think}</think><answer>{boxed(self.answer)}</answer>"

    @property
    def slipped(self) -> str:
        """A worked solution with correct reasoning and a wrong result (the next of the choices)."""
        wrong = self.choices[(self.choices.index(self.answer) + 1) % len(self.choices)]
        return f"<think>{self.think}</think><answer>{boxed(wrong)}</answer>"

    @property
    def content(self) -> str:
        """Hash of what is asked and shown."""
        return hashlib.sha256(self.question.encode() + self.image.tobytes()).hexdigest()


def boxed(answer: str) -> str:
    """An answer as MathV60K writes it."""
    return f"$\\boxed{{{answer}}}$"


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (width, height), (255, 255, 255))
    return image, ImageDraw.Draw(image)


def count_circles(rng: random.Random) -> Example:
    """One to six filled circles on a 3 x 3 grid of places."""
    count = rng.randint(1, 6)
    image, draw = _canvas(84, 84)
    color = COLORS[rng.choice(sorted(COLORS))]
    for place in rng.sample(range(9), count):
        x, y = 28 * (place % 3) + 14 + rng.randint(-3, 3), 28 * (place // 3) + 14 + rng.randint(-3, 3)
        radius = rng.randint(7, 10)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return Example("count", "How many circles are there?", f"{count} circles", str(count), COUNTS, image)


def highest_bar(rng: random.Random) -> Example:
    """A red, a green and a blue bar in any order; the highest stands out by at least a sixth of the image."""
    names = ["red", "green", "blue"]
    winner = rng.randrange(3)
    image, draw = _canvas(84, 56)
    top = rng.randint(22, 52)
    for place, bar in enumerate(rng.sample(range(3), 3)):
        height = top if bar == winner else rng.randint(4, top - 10)
        left = 28 * place + rng.randint(3, 9)
        draw.rectangle((left, 56 - height, left + 15, 55), fill=COLORS[names[bar]])
    question = "Which bar is the highest?\n\nA. red\nB. green\nC. blue"
    return Example("bar", question, f"{names[winner]} bar", LETTERS[winner], LETTERS, image)


def read_angle(rng: random.Random) -> Example:
    """The angle of a filled sector that opens from the horizontal."""
    angle = rng.choice(ANGLES)
    image, draw = _canvas(84, 56)
    color = COLORS[rng.choice(sorted(COLORS))]
    x, y = 42 + rng.randint(-4, 4), 50 + rng.randint(-2, 2)
    length = rng.randint(32, 38)
    draw.pieslice((x - length, y - length, x + length, y + length), -angle, 0, fill=color)
    return Example(
        "angle",
        "What is the angle in degrees?",
        f"{angle} degrees",
        str(angle),
        tuple(map(str, ANGLES)),
        image,
    )


def draw_digit(
    draw: ImageDraw.ImageDraw,
    digit: int,
    x: int,
    y: int,
    size: int,
    color: tuple[int, int, int],
    width: int = 4,
) -> None:
    """A seven-segment digit with its upper left corner at (x, y), `size` wide and twice as high, of lines
    `width` pixels wide."""
    ends = {"a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2), "e": (0, 1, 0, 2),
            "f": (0, 0, 0, 1), "g": (0, 1, 1, 1)}  # fmt: skip
    for segment in SEGMENTS[digit]:
        x0, y0, x1, y1 = (size * part for part in ends[segment])
        draw.line((x + x0, y + y0, x + x1, y + y1), fill=color, width=width)


def add_numbers(rng: random.Random) -> Example:
    """Two drawn digits from 0 to 4; every sum from 0 to 8 is equally likely."""
    total = rng.randint(0, 8)
    left = rng.randint(max(0, total - 4), min(4, total))
    right = total - left
    image, draw = _canvas(56, 56)
    color = COLORS[rng.choice(sorted(COLORS))]
    for place, digit in enumerate((left, right)):
        draw_digit(draw, digit, 7 + 28 * place + rng.randint(-2, 2), 12 + rng.randint(-2, 2), 14, color)
    return Example(
        "add", "What is the sum of the two numbers?", f"{left}+{right}={total}", str(total), SUMS, image
    )


KINDS: dict[str, Callable[[random.Random], Example]] = {
    "count": count_circles,
    "bar": highest_bar,
    "angle": read_angle,
    "add": add_numbers,
}


def example(seed: int, split: str, index: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Example:
    """The example with this index: kinds take turns, everything else follows from the seed."""
    rng = random.Random(f"{seed}/{split}/{index}")
    return KINDS[kinds[index % len(kinds)]](rng)


def examples(seed: int, split: str, rows: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Example]:
    """The first `rows` examples of a split."""
    return (example(seed, split, index, kinds) for index in range(rows))


def unique(
    seed: int, split: str, rows: int, kinds: tuple[str, ...] = tuple(KINDS), taken: set[str] | None = None
) -> Iterator[Example]:
    """The first `rows` examples of a split whose content is neither in `taken` nor seen before; `taken`
    grows."""
    taken = set() if taken is None else taken
    index = found = 0
    while found < rows:
        item = example(seed, split, index, kinds)
        index += 1
        if item.content not in taken:
            taken.add(item.content)
            found += 1
            yield item


def write(
    out_dir: str | Path,
    rows: int,
    seed: int = 0,
    split: str = "train",
    slips: float = 0.0,
    taken: set[str] | None = None,
) -> Path:
    """Writes `shapes_message.jsonl` and `shapes_img.tar.gz` into `out_dir`, the very bytes for the same
    arguments.

    As in MathV60K, image paths are absolute ones of the machine that made the set; only their end, from the
    archive's top folder on, means anything. Contents in `taken` are left out, so that splits stay disjoint.
    `slips` is the share of worked solutions that end on a wrong result: a model that learns from them can
    still improve by reward.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with (
        open(out / "shapes_img.tar.gz", "wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
        open(out / "shapes_message.jsonl", "w", encoding="utf-8") as lines,
    ):
        for index, item in enumerate(unique(seed, split, rows, taken=taken)):
            name = f"shapes_img/{item.kind}/{split}-{index:06d}.png"
            slip = random.Random(f"{seed}/{split}/slip/{index}").random() < slips
            _add_image(archive, name, item.image)
            lines.write(json.dumps(_raw_row(item, name, slip)) + "\n")
    return out


def _add_image(archive: tarfile.TarFile, name: str, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    member = tarfile.TarInfo(name)
    member.size = buffer.tell()
    buffer.seek(0)
    archive.addfile(member, buffer)


def _raw_row(item: Example, name: str, slip: bool) -> dict[str, str]:
    content = [{"type": "text", "text": item.question}, {"type": "image", "image": f"/data/shapes/{name}"}]
    message = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]
    return {
        "question": item.question,
        "answer": boxed(item.answer),
        "message": json.dumps(message),
        "solution": item.slipped if slip else item.solution,
    }


def prepare(
    out: str | Path,
    train_rows: int = 2048,
    test_rows: int = 256,
    seed: int = 0,
    warm_rows: int = 6400,
    slips: float = SLIPS,
) -> Manifest:
    """The set with the splits `train`, `test` and `warm`, prepared from its raw files, which have
    MathV60K's form.

    `warm` is for the supervised phase before: its images are in neither of the others, and `slips` of its
    solutions end on a wrong result.
    """
    taken: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        sources = []
        for split, rows, share in (
            ("test", test_rows, 0.0),
            ("train", train_rows, 0.0),
            ("warm", warm_rows, slips),
        ):
            if rows:
                raw = write(Path(scratch) / split, rows, seed, split, share, taken)
                images = [raw / "shapes_img.tar.gz"]
                sources += own(raw / "shapes_message.jsonl", "shapes", images, Given(split=split))
        return convert(sources, out, "shapes")


def corpus() -> list[str]:
    """The sentences of the set, for a tokenizer to be trained on."""
    texts = [SYSTEM_PROMPT]
    for item in examples(0, "corpus", 200):
        texts += [item.question, item.solution]
    return texts


def main() -> int:
    """Command line: `python -m examples.demo.shapes --out DIRECTORY`."""
    parser = argparse.ArgumentParser(description=prepare.__doc__)
    parser.add_argument("--out", required=True, help="directory of the prepared data set")
    parser.add_argument("--rows", type=int, default=2048, help="training rows (%(default)s)")
    parser.add_argument("--test-rows", type=int, default=256, help="test rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    options = parser.parse_args()
    prepare(options.out, options.rows, options.test_rows, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
