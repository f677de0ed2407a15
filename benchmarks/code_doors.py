"""Hostile pictures, observations and code of people's, through their doors (doors.py)."""

from __future__ import annotations

import base64
import contextlib
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.hostile import CODE, DEEDS, KINDS, MODES, TEXTS, Draw, drawing, expect, hostile_value, mutated
from data_prep.ingest.images import inspect
from trainer.config import ConfigError, RewardFunction, Turns
from trainer.images.decoding import ImageLimits, decode_image
from trainer.rewards.completion_facts import facts_of, function_specs
from trainer.rewards.process_pool import ProcessPool
from trainer.sampling.api_server import decode_as_training
from trainer.turns.episode import ERROR, FAILED, Observation, Situation
from trainer.turns.messages import packed, unpacked
from trainer.turns.own_environment import OwnEnvironment

DEADLINE_S = 3.0
"""Longest call of people's code."""


def picture(draw: Draw, folder: Path) -> str:
    """An encoded image whose bytes were changed: what the checks call sound, training decodes alike."""
    data = mutated(draw, drawing(draw, draw.choice(KINDS), draw.choice(MODES)))
    facts = inspect(data, ImageLimits())
    if facts.error:
        return "named"
    image = decode_image(data, "row")
    expect(
        image.mode == "RGB" and image.size == (facts.width, facts.height), f"{image.size}, and not {facts}"
    )
    return "right"


@cache
def serving_decoder() -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    decode_as_training()
    return ImageMediaIO()


def requested_picture(draw: Draw, folder: Path) -> str:
    """An image of a request to `serve`: shown as training shows it, or refused with status 400."""
    data = drawing(draw, draw.choice(KINDS), draw.choice(MODES))
    data = mutated(draw, data) if draw.random() < 0.7 else data
    text = base64.b64encode(data).decode() if draw.random() < 0.9 else draw.choice(TEXTS)
    try:
        shown = serving_decoder().load_base64("image/png", text).media
    except ValueError:
        return "named"
    expect(
        shown.tobytes() == decode_image(data, "row").tobytes(), "serving shows another image than training"
    )
    return "right"


def observation(draw: Draw, folder: Path) -> str:
    """What a tool shows: any text, and images of any size and mode."""
    sizes = (0, 1, 4, 30, 500)
    images = []
    for _ in range(draw.choice((0, 1, 2))):
        images.append(Image.new(draw.choice((*MODES, "YCbCr")), (draw.choice(sizes), draw.choice(sizes))))
    try:
        shown = Observation(hostile_value(draw, 1), images)
    except ValueError as error:
        packed({"failed": str(error)})
        return "named"
    about, again = unpacked(packed({"text": shown.text}, shown.images))
    about["text"].encode()
    expect([image.mode for image in again] == ["RGB"] * len(images), "images are lost on the way")
    return "right"


def message(draw: Draw, folder: Path) -> str:
    """What a process with a user's code sends, changed on the way."""
    with contextlib.suppress(ValueError):
        unpacked(mutated(draw, packed({"text": "x"}, [Image.new("RGB", (5, 4))])))
        return "right"
    return "named"


@cache
def code_file() -> str:
    path = Path(tempfile.mkdtemp()) / "mine.py"
    path.write_text(CODE)
    return str(path)


def graders(path: str) -> ProcessPool:
    return ProcessPool(1, DEADLINE_S, function_specs([RewardFunction(path=f"{path}:reward")]))


def environment(path: str) -> OwnEnvironment:
    return OwnEnvironment(Turns(environment=f"{path}:Mine", tool_seconds=DEADLINE_S))


kept_graders, kept_environment = cache(graders), cache(environment)


def end_processes() -> None:
    """Ends the processes of people's code."""
    kept_graders(code_file()).close()
    kept_environment(code_file()).processes.close()
    kept_graders.cache_clear()
    kept_environment.cache_clear()


def deed(draw: Draw) -> str:
    """What a user's code does."""
    return repr(hostile_value(draw, 2)) if draw.random() < 0.3 else draw.choice(DEEDS)


def reward_function(draw: Draw, folder: Path) -> str:
    """A user's function returns, raises, prints or does anything; the next completion is graded right."""
    sound_text = f"={draw.randrange(99)}"
    outcomes = []
    for text in (deed(draw), sound_text):
        task = ["user", text, facts_of("", "number", "", {})]
        verdict, value, why, _ = kept_graders(code_file()).submit(task).result(timeout=60)
        sound = verdict in ("correct", "wrong") and math.isfinite(value) and not why
        expect(
            sound or (verdict in ("error", "timeout") and len(why.splitlines()) == 1), (text, verdict, why)
        )
        outcomes.append("right" if sound else "named")
    expect(value == float(sound_text[1:]), f"{sound_text} gave {value, why}")
    return outcomes[0]


def own_environment(draw: Draw, folder: Path) -> str:
    """A user's environment answers and scores with anything; the next reply is answered right."""
    text, sound_text = deed(draw), f"={draw.randrange(99)}"
    mine, situation = kept_environment(code_file()), Situation((), lambda reply: None)
    answer, score = mine.answer(situation, [text]), mine.score(situation, [text])
    expect(score is None or math.isfinite(score), f"{text} scored {score}")
    after = mine.answer(situation, [sound_text])
    right = after is not None and after.text == f"got {sound_text}"
    expect(right and mine.score(situation, [sound_text]) == float(sound_text[1:]), f"{after} after {text}")
    return "named" if answer and answer.text.encode().decode().startswith((FAILED, ERROR)) else "right"


def code(draw: Draw, folder: Path) -> str:
    """A user's file whose bytes were changed is loaded or refused in one line."""
    path = folder / "mine.py"
    path.write_bytes(mutated(draw, CODE.encode()))
    try:
        if draw.random() < 0.5:
            environment(str(path)).processes.close()
        else:
            with contextlib.closing(graders(str(path))) as pool:
                pool.check()
    except ConfigError as error:
        expect(len(str(error).splitlines()) == 1, f"a reason of several lines: {error}")
        return "named"
    return "right"
