"""A process with a user's environment: `python -m trainer.turns.environment_process FD PARENT SPEC`.

SPEC is `path/to/file.py:NAME`, a class or function that is called without arguments. What it gives has the
methods of `episode.Environment`; `answer` is enough.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from PIL import Image

from trainer.system.own_file import OwnFileError, at_fault, load_named
from trainer.system.process_keeper import run_under_keeper
from trainer.turns.calls import BadCallError, Call
from trainer.turns.episode import Environment, Observation, SeenPicture, Situation
from trainer.turns.messages import packed, unpacked

KEY = "turns.environment"
LONGEST_TEXT = 20_000
"""Characters of an observation."""
LARGEST_IMAGE = 16_000_000
"""Pixels of an image of an observation."""
MOST_IMAGES = 16
"""Images of one observation."""
MOST_WRONG = 400
"""Characters of what is wrong with a call."""


def loaded(spec: str) -> Any:
    """A user's environment. Raises OwnFileError."""
    try:
        environment = load_named(KEY, spec)()
    except OwnFileError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnFileError(_said(spec, error)) from None
    if not callable(getattr(environment, "answer", None)):
        raise OwnFileError(f"{KEY} {spec}: it has no method `answer(situation, replies)`")
    return environment


def described(environment: Any) -> dict[str, Any]:
    """What a rank must know of it."""
    scorer = getattr(type(environment), "score", None)
    return {
        "pid": os.getpid(),
        "tools": list(getattr(environment, "tools", ())),
        "shows_images": bool(getattr(environment, "shows_images", False)),
        "replayable": bool(getattr(environment, "replayable", True)),
        "scores": scorer is not None and scorer is not Environment.score,
    }


def situation_of(about: Mapping[str, Any], images: Sequence[Image.Image]) -> Situation:
    """The situation that a rank sent."""
    pictures = []
    for image, seen in zip(images, about["seen"], strict=True):
        pictures.append(SeenPicture(image, tuple(seen)))

    def call(reply: str) -> Call | None:
        made = about["calls"][reply]
        if isinstance(made, str):
            raise BadCallError(made)
        return Call(*made) if made else None

    return Situation(pictures, about["verdicts"].get, about["cell"], about["row"], call)


def answered(environment: Any, about: Mapping[str, Any], images: Sequence[Image.Image]) -> bytes:
    """The reply to one question of a rank. Raises what the environment raises, and ValueError for what cannot
    be shown."""
    situation = situation_of(about, images)
    if about["asks"] == "score":
        value = float(environment.score(situation, about["replies"]))
        if not math.isfinite(value):
            raise ValueError(f"its score is {value}")
        return packed({"score": value})
    try:
        observation = environment.answer(situation, about["replies"])
    except BadCallError as error:
        return packed({"wrong": " ".join(str(error).split())[:MOST_WRONG]})
    if observation is None:
        return packed({})
    if isinstance(observation, str):
        observation = Observation(observation)
    text = observation.text
    shown = list(observation.images)
    role = observation.role
    if not isinstance(text, str) or role not in ("tool", "user"):
        raise ValueError("an observation has a text, and a role that is tool or user")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"its text has {len(text)} characters, more than {LONGEST_TEXT}")
    if shown and not getattr(environment, "shows_images", False):
        raise ValueError("it shows an image without `shows_images`")
    if len(shown) > MOST_IMAGES:
        raise ValueError(f"it shows {len(shown)} images, more than {MOST_IMAGES}")
    for image in shown:
        # By the header of one that is not decoded yet, which may be a bomb.
        if image.width * image.height > LARGEST_IMAGE:
            raise ValueError(
                f"an image of {image.width} x {image.height} has more than {LARGEST_IMAGE} pixels"
            )
    return packed({"text": text, "role": role}, shown)


def serve(connection: Connection, spec: str) -> None:
    """Sends ["ready", about] or ["failed", why], then answers until the rank closes the connection."""
    try:
        environment = loaded(spec)
        about = described(environment)
        hello = json.dumps(["ready", about])
    except (OwnFileError, TypeError, ValueError) as error:
        connection.send_bytes(json.dumps(["failed", str(error)]).encode())
        return
    connection.send_bytes(hello.encode())
    while True:
        question, images = unpacked(connection.recv_bytes())
        try:
            reply = answered(environment, question, images)
        except (Exception, SystemExit) as error:
            said = _said(spec, error)
            print(f"turns: {said}", file=sys.stderr, flush=True)
            # The model reads what went wrong, and not where a person keeps files.
            reply = packed({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        connection.send_bytes(reply)


def _said(spec: str, error: BaseException) -> str:
    said = " ".join(str(error).split())[:300]
    return f"{KEY} {spec}: {type(error).__name__}: {said}{at_fault(error, spec.rpartition(':')[0])}"


def main() -> None:
    descriptor, parent, spec = sys.argv[1:]

    def body() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(EOFError, OSError):
            serve(Connection(int(descriptor)), spec)

    run_under_keeper(int(parent), int(descriptor), body)


if __name__ == "__main__":
    main()
