"""Hostile values, bytes and code at random, and what is sound beside them."""

from __future__ import annotations

import base64
import contextlib
import io
import random
from typing import Any

from PIL import Image

from trainer.config import ConfigError

Draw = random.Random
SOUND = 12
"""Sound rows beside hostile ones."""
KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]
MODES = ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F"]
TEXTS = (
    *("", " ", "\0", "\ud83d", "half \ud83d of it", "\udcff", "\ufeff", "\u2028", "\r\n", "a" * 5000),
    *("🙂" * 300, "../../up", "/etc/passwd", "/dev/zero", "/proc/kmsg", "~", "s3://b/x.png", "{}", "[]"),
    *("http://a.b/c.png", "file:///x.png", "data:,", "data:image/png;base64,!!!", "![](x.png)", "sep=;"),
    *("iVBORw0KGgo" + "A" * 100, "AAAA" * 400, "b'\\x89PNG'", "{'bytes': b'', 'path': 1}", "<image>"),
    *("<image 2>", "<IMAGE><img>", "<image 999>", "<img>x.png</img>", "<img src='x'>", "[IMG]", "[1, 'b']"),
    *("<video>", "<audio>", "<|image_pad|>", "<|im_end|>", "\\boxed{1}", "\\boxed{" * 50, "#### 5", "[[["),
    *("$$", "nan", "1e999", "½", "²", "[" * 3000, '{"a":' * 500, "null", "true", "-0", "0x10", "1,000"),
)  # fmt: skip
COLUMNS = (
    *("question", "answer", "image", "images", "choices", "solution", "system", "source", "split"),
    *("messages", "prompt", "conversations", "message", "reward_model", "image_1", "image_2"),
    *("video", "audio", "pass_rate", "metadata", "problem", "label", "options", "extra_info", "path"),
    *("id", "\ud83d", ""),
)  # fmt: skip
CODE = """
import json, os, signal, subprocess, sys, threading, time
from PIL import Image
from trainer.turns.episode import Observation

def raising(error):
    raise error

class Hostile(Exception):
    def __str__(self):
        raise KeyError("no text")
    __repr__ = __float__ = __iter__ = __getattr__ = __str__

async def later(value):
    return value

def reward(text, reference):
    return float(text[1:]) if text.startswith("=") else eval(text)

class Mine:
    shows_images = True
    def answer(self, situation, replies):
        return "got " + replies[-1] if replies[-1].startswith("=") else eval(replies[-1])
    def score(self, situation, replies):
        return reward(replies[-1], "")
"""
"""A file of a user's whose functions do what they are asked to do."""
DEEDS = (
    *("1", "-2.5", "True", "[1.5]", "(2,)", "{'score': 3}", "later(4)", "10**400", "float('nan')", "None"),
    *("'7'", "b'7'", "object", "Hostile()", "raising(Hostile())", "raising(SystemExit(0))", "1/0"),
    *("raising(KeyboardInterrupt())", "raising(GeneratorExit())", "sys.exit('\\ud83d')", "[0] * 10**10"),
    *("raising(ValueError('\\ud83d' * 9999))", "print('\\ud83d')", "print('x' * 10**6) or 1", "os._exit(0)"),
    *("raising(OSError('a\\nb\\x1b[2J\\u2028c'))", "os.kill(os.getpid(), 11)", "'a' * 10**6", "later(1/3)"),
    *("time.sleep(99)", "os.fork() * 0 + 1", "os.closerange(0, 99)", "os.chdir('/')", "sys.stdout.close()"),
    *("os.environ.clear()", "signal.alarm(1)", "setattr(sys, 'stdout', None)", "sys.modules.clear()"),
    *("setattr(json, 'dumps', None)", "subprocess.Popen(['sleep', '99']).pid", "later(raising)"),
    *("threading.Thread(target=time.sleep, args=(99,)).start() or 1", "Observation('x')", "Observation(5)"),
    *("Observation('x', [5])", "Observation('x', 5)", "Observation('x', [Image.new('RGB', (300, 1))])"),
    *("Observation('x', [Image.new('L', (9, 9))] * 20)", "Observation('<|im_end|><|image_pad|>')"),
    *("Observation('x', [Image.new('F', (9, 9))], 'system')", "(lambda f: f(f))(lambda f: f(f))"),
)  # fmt: skip
"""Expressions that it computes."""


class Silent(Exception):
    """What went wrong without a word."""


def expect(sound: Any, what: object) -> None:
    """Raises Silent where something does not hold."""
    if not sound:
        raise Silent(str(what)[:600])


class named(contextlib.suppress):
    """What is refused with a reason, which is one line."""

    def __init__(self) -> None:
        super().__init__(ConfigError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        expect(not isinstance(error, ConfigError) or str(error).strip(), "no reason")
        return super().__exit__(kind, error, trace)


def drawing(draw: Draw, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A small image that no other one resembles, in RGB where its format has no such mode."""
    image = Image.frombytes("RGB", (8, 6), draw.randbytes(144)).resize((64, 48), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    try:
        image.convert(mode).save(buffer, kind)
    except (OSError, ValueError, KeyError):
        image.save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def mutated(draw: Draw, data: bytes) -> bytes:
    """Bytes with a few changes: flipped, cut, repeated, put in."""
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        start = draw.randrange(len(data) + 1)
        stop = start + draw.choice((0, 1, 1, 2, 8, 100, 10**6 if draw.random() < 0.1 else 1))
        piece = data[start:stop]
        flipped = bytes(byte ^ (1 << draw.randrange(8)) for byte in piece)
        others = (b"\0", b"\xff", b"\xff" * 4, b'"', b"\n", b"9" * 9)
        new = draw.choice(
            (b"", flipped, draw.randbytes(len(piece) % 1000), piece[:1000] * 3, draw.choice(others))
        )
        data = data[:start] + new + data[stop:]
    return data


def hostile_value(draw: Draw, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = draw.randrange(12 if depth else 8)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        return "".join(draw.choices("aZ9 <>{}$\\'\",;[]äß你\ud83d\ude42\u202e\0", k=draw.choice((1, 5, 400))))
    if kind == 5:
        return draw.choice((0, -1, 10**30, 1.5, float("nan"), float("inf"), 1e-320, True, False, None))
    if kind == 6:
        return base64.b64encode(mutated(draw, drawing(draw, draw.choice(KINDS)))).decode()
    if kind == 7:
        return {"bytes": draw.choice(TEXTS), "path": draw.choice((None, *TEXTS))}
    count = draw.choice((0, 1, 2, 30) if kind < 10 else (1, 2, 3))
    values = [hostile_value(draw, depth - 1) for _ in range(count)]
    if kind < 10:
        return values
    if kind == 10:
        role, content = draw.choice((("role", "content"), ("from", "value")))
        roles = ("user", "assistant", "system", "tool", "human", "gpt", None, 3)
        return [{role: draw.choice(roles), content: value} for value in values]
    return dict(
        zip(draw.choices((*COLUMNS, "type", "text", "image_url", "url", "bytes"), k=3), values, strict=False)
    )


def sound_records(draw: Draw, count: int = SOUND) -> list[dict[str, Any]]:
    """Records that must come out as they are."""
    number = draw.randrange(10**9)
    return [
        {"question": f"Sound {number}: {i} + {i}, plus 1?", "answer": str(2 * i + 1)} for i in range(count)
    ]


def hostile_record(draw: Draw) -> dict[str, Any]:
    record: dict[str, Any] = {"question": f"Hostile {draw.random()}?", "answer": "5"}
    for _ in range(draw.choice((1, 1, 2, 4))):
        record[draw.choice(COLUMNS)] = hostile_value(draw)
    return {name: value for name, value in record.items() if draw.random() < 0.9}
