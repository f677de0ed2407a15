"""Digits too small to read in the picture as the model sees it: what the demo of the tool `zoom` learns from.

    python -m examples.zoom.framed --out DATA/framed

A picture of SIDE pixels has a digit in a frame at three of nine places, each frame in a color of its own. The
model sees it in SEEN pixels, where a digit is three pixels high; what `zoom` shows of a frame is as large as
the digits that the demo without tools reads.

    train, test    questions alone
    warm           worked episodes that call the tool, and as many replies that answer at once
    plain          the pictures of warm, all answered at once, where no tool is offered

Every row is a pure function of (seed, split, index).
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from data_prep.sources.source import worked
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
FRAME = 21
"""Half of a frame's side, in pixels of the picture."""
MARGIN = 9
"""Between an image token's edge and the box of a worked call, in pixels as the model sees them."""
TURNS = Turns(environment="zoom", limit=3, image_pixels=SEEN**2)


@dataclass(frozen=True)
class FramedPicture:
    """A picture, and what is asked about it."""

    image: Image.Image
    color: str
    """Color of the frame that is asked for."""
    place: int
    """Where it is, from 0 to 8."""
    digit: int

    @property
    def question(self) -> str:
        return f"Which digit is in the {self.color} frame?"

    @property
    def solution(self) -> str:
        return worked(f"It is {self.digit}.", str(self.digit))


def picture(seed: int, split: str, index: int) -> FramedPicture:
    """The picture with this index. All digits are equally likely whatever is asked."""
    rng = random.Random(f"framed/{seed}/{split}/{index}")
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    colors = rng.sample(sorted(COLORS), 3)
    places = rng.sample(range(9), 3)
    digits = [rng.randrange(10) for _ in colors]
    for color, place, digit in zip(colors, places, digits, strict=True):
        x = SIDE // 3 * (place % 3) + SIDE // 6 + rng.randint(-6, 6)
        y = SIDE // 3 * (place // 3) + SIDE // 6 + rng.randint(-6, 6)
        draw.rectangle((x - FRAME, y - FRAME, x + FRAME, y + FRAME), outline=COLORS[color], width=5)
        draw_digit(draw, digit, x - 5 + rng.randint(-2, 2), y - 10 + rng.randint(-2, 2), 10, (0, 0, 0), 3)
    return FramedPicture(image, colors[0], places[0], digits[0])


def box_of(place: int) -> list[int]:
    """Box of a worked call, in pixels as the model sees them."""
    left, top = CELL * (place % 3), CELL * (place // 3)
    return [left + MARGIN, top + MARGIN, left + CELL - MARGIN, top + CELL - MARGIN]


def asked(one: FramedPicture) -> list[dict[str, Any]]:
    """The question as a chat."""
    content = [{"type": "text", "text": one.question}, {"type": "image"}]
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def looked(one: FramedPicture) -> tuple[list[dict[str, Any]], Image.Image]:
    """A worked call and what the tool answers, as messages, and the image that it shows."""
    box = box_of(one.place)
    situation = Situation([SeenPicture(one.image, (SEEN, SEEN))], lambda reply: None, CELL)
    observation = Zoom(TURNS.image_pixels).use(situation, {"box": box})
    before, behind = as_result(observation.text)
    content = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": behind}]
    called = json.dumps({"name": "zoom", "arguments": {"box": box}})
    call = {"role": "assistant", "content": f"<tool_call>\n{called}\n</tool_call>"}
    return [call, {"role": "user", "content": content}], observation.images[0]


def rows(seed: int, split: str, count: int) -> Iterator[Row]:
    """The first `count` rows of a split."""
    for index in range(count):
        one = picture(seed, "warm" if split == "plain" else split, index)
        messages = asked(one)
        images = [one.image]
        extra: dict[str, Any] = {}
        if split == "warm":
            messages = with_tools(messages, tools_of(TURNS))
            if index % 2:
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
            answer=str(one.digit),
            answer_type="number",
            solution=one.solution if split in ("warm", "plain") else "",
            extra=extra,
        )


def png(image: Image.Image) -> bytes:
    """An image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def prepare(
    out: str | Path, train_rows: int = 1024, test_rows: int = 256, warm_rows: int = 6400, seed: int = 0
) -> Manifest:
    """Writes all four splits."""
    counts = {"train": train_rows, "test": test_rows, "warm": warm_rows, "plain": warm_rows}
    splits = {split: rows(seed, split, count) for split, count in counts.items()}
    return write_dataset(out, "framed", splits, {"seed": seed})


def tokenizer() -> Any:
    """A tokenizer in which the offer of the tool and its calls take few tokens."""
    texts = []
    for place in range(9):
        for color in COLORS:
            one = FramedPicture(Image.new("RGB", (SIDE, SIDE)), color, place, place)
            messages = with_tools(asked(one), tools_of(TURNS)) + looked(one)[0]
            for message in messages:
                content = message["content"]
                parts = [{"text": content}] if isinstance(content, str) else content
                texts += [f"{message['role']}\n{part.get('text', '')}" for part in parts]
            texts.append(one.solution)
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
