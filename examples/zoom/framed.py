"""Digits too small to read in the picture as the model sees it: what the demo of the tool `zoom` learns from.

    python -m examples.zoom.framed --out DATA/framed

A picture of SIDE pixels has a digit in a frame at one of nine places, whose backgrounds differ, since a tiny
model has no other way to tell them apart. The model sees it in SEEN pixels, where a digit is three pixels
high; what `zoom` shows of a frame is as large as the digits that the demo without tools reads, and the digit
lies within one image token, as there.

    train, test    questions alone
    short          what `zoom` shows of a frame, and where the frame is, without the tool: a tiny model learns
                   both within a few steps, and not always among the long rows of warm
    warm           worked episodes that call the tool, and for every three of these a reply that answers at
                   once all the same
    plain          the pictures of warm answered at once, where no tool is offered

Every row is a pure function of (seed, split, index).
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from data_prep.sources.row_source import worked
from data_prep.write.shards import write_dataset
from examples.demo.shapes import COLORS, SYSTEM_PROMPT, draw_digit
from examples.demo.tiny_model import build_tokenizer
from trainer.config import Turns
from trainer.data.schema import LEARNED, Manifest, Row, row_id
from trainer.turns.calls import as_result, with_tools
from trainer.turns.environments import tools_of
from trainer.turns.episode import SeenPicture, Situation
from trainer.turns.zoom import Zoom

CELL = 28
"""Pixels of the side of an image token."""
SEEN = 3 * CELL
"""Side of a picture as the model sees it, in pixels: a place is one image token."""
SCALE = 6
SIDE = SCALE * SEEN
FRAME = 54
"""Half of a frame's side, in pixels of the picture."""
MARGIN = 9
"""Between an image token's edge and the box of a worked call, in pixels as the model sees them."""
WORKED = ("short", "warm", "plain")
"""The splits with solutions."""
TURNS = Turns(environment="zoom", limit=3, image_pixels=SEEN**2)


@dataclass(frozen=True)
class FramedPicture:
    """A picture, and what is asked about it."""

    image: Image.Image
    place: int
    """Where the frame is, from 0 to 8."""
    digit: int

    @property
    def solution(self) -> str:
        return worked(f"It is {self.digit}.", str(self.digit))


def picture(seed: int, split: str, index: int) -> FramedPicture:
    """The picture with this index: all digits and places are equally likely."""
    rng = random.Random(f"framed/{seed}/{split}/{index}")
    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    part = SIDE // 3
    for at in range(9):
        left, top = part * (at % 3), part * (at // 3)
        draw.rectangle((left, top, left + part, top + part), fill=background(at))
    place, digit = rng.randrange(9), rng.randrange(10)
    x = part * (place % 3) + part // 2 + rng.randint(-1, 1)
    y = part * (place // 3) + part // 2 + rng.randint(-1, 1)
    color = COLORS[rng.choice(sorted(COLORS))]
    draw.rectangle((x - FRAME, y - FRAME, x + FRAME, y + FRAME), (255, 255, 255), color, 18)
    draw_digit(draw, digit, x - 5 + rng.randint(-1, 1), y - 9 + rng.randint(-1, 1), 9, (0, 0, 0), 3)
    return FramedPicture(image, place, digit)


def background(place: int) -> tuple[int, int, int]:
    """Color of a place: its column in red, its row in green."""
    return 255 - 100 * (place % 3), 255 - 100 * (place // 3), 255


def box_of(place: int) -> list[int]:
    """Box of a worked call, in pixels as the model sees them."""
    left, top = CELL * (place % 3), CELL * (place // 3)
    return [left + MARGIN, top + MARGIN, left + CELL - MARGIN, top + CELL - MARGIN]


QUESTION = "Which digit is in the frame?"
WHERE = "Where is the frame?"


def asked(question: str = QUESTION) -> list[dict[str, Any]]:
    """The question as a chat."""
    content = [{"type": "text", "text": question}, {"type": "image"}]
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def looked(one: FramedPicture) -> tuple[list[dict[str, Any]], Image.Image]:
    """A worked call and what the tool answers, as messages, and the image that it shows."""
    called = json.dumps({"name": "zoom", "arguments": {"box": box_of(one.place)}})
    reply = f"<tool_call>\n{called}\n</tool_call>"
    situation = Situation([SeenPicture(one.image, (SEEN, SEEN))], lambda reply: None, CELL)
    observation = Zoom(TURNS.image_pixels).answer(situation, [reply])
    assert observation and observation.images, "a worked call shows its part of the picture"
    before, behind = as_result(observation.text)
    content = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": behind}]
    return [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": content},
    ], observation.images[0]


def rows(seed: int, split: str, count: int) -> Iterator[Row]:
    """The first `count` rows of a split."""
    for index in range(count):
        one = picture(seed, "warm" if split == "plain" else split, index)
        messages, images = asked(), [one.image]
        answer, solution = str(one.digit), one.solution if split in WORKED else ""
        extra: dict[str, Any] = {}
        if split == "short" and index % 2:
            messages = asked(WHERE)
            answer = solution = str(box_of(one.place))
        elif split == "short":
            images = [looked(one)[1]]
        elif split == "warm":
            messages = with_tools(messages, tools_of(TURNS))
            if index % 4:
                messages_behind, shown = looked(one)
                extra = {LEARNED: [len(messages)]}
                messages += messages_behind
                images.append(shown)
        encoded = [png(image) for image in images]
        yield Row(
            id=row_id("framed", messages, encoded),
            source="framed",
            messages=messages,
            images=encoded,
            answer=answer,
            answer_type="number" if answer.isdigit() else "text",
            solution=solution,
            extra=extra,
        )


def png(image: Image.Image) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def prepare(
    out: str | Path, train_rows: int = 1024, test_rows: int = 256, warm_rows: int = 9600, seed: int = 0
) -> Manifest:
    """Writes all splits."""
    counts = {"train": train_rows, "test": test_rows} | dict.fromkeys(WORKED, warm_rows)
    splits: dict[str, Iterable[Row]] = {split: rows(seed, split, count) for split, count in counts.items()}
    return write_dataset(out, "framed", splits, {"seed": seed})


def tokenizer() -> Any:
    """A tokenizer in which the offer of the tool and its calls take few tokens."""
    texts = []
    for place in range(9):
        one = FramedPicture(Image.new("RGB", (SIDE, SIDE)), place, place)
        for message in with_tools(asked(), tools_of(TURNS)) + looked(one)[0]:
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            texts += [f"{message['role']}\n{part.get('text', '')}" for part in parts]
        texts += [one.solution, WHERE]
    return build_tokenizer(texts, merges=4096)


def main() -> int:
    """Command line: `python -m examples.zoom.framed --out DIRECTORY`."""
    parser = argparse.ArgumentParser(description=prepare.__doc__)
    parser.add_argument("--out", required=True, help="directory of the prepared data set")
    parser.add_argument("--rows", type=int, default=1024, help="training rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures")
    options = parser.parse_args()
    prepare(options.out, options.rows, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
