"""A user's environment in a process of its own (trainer/system/answering_process.py).

It is `path/to/file.py:NAME`, a class or function that is called without arguments. What it gives has the
methods of `episode.Environment`; `answer` is enough.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from trainer.system.own_file import OwnFileError, fault_of, load_named, result_of
from trainer.turns.calls import BadCallError, Call
from trainer.turns.episode import Environment, Observation, SeenPicture, Situation
from trainer.turns.messages import packed, unpacked

KEY = "turns.environment"
LONGEST_TEXT = 20_000
"""Characters of an observation."""
MOST_IMAGES = 16
"""Images of one observation."""
MOST_WRONG = 400
"""Characters of what is wrong with a call."""
MOST_SAID = 200
"""Characters of an exception that a model reads."""


def loaded(spec: str) -> Any:
    """A user's environment. Raises OwnFileError."""
    try:
        environment = load_named(KEY, spec)()
    except OwnFileError:
        raise
    except BaseException as error:
        raise OwnFileError(fault_of(KEY, spec, error)) from None
    if not callable(getattr(environment, "answer", None)):
        raise OwnFileError(f"{KEY} {spec}: it has no method `answer(situation, replies)`")
    return environment


def described(environment: Any) -> dict[str, Any]:
    """What a rank must know of it."""
    scorer = getattr(type(environment), "score", None)
    return {
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
        value = float(result_of(environment.score(situation, about["replies"])))
        if not math.isfinite(value):
            raise ValueError(f"its score is {value}")
        return packed({"score": value})
    try:
        observation = result_of(environment.answer(situation, about["replies"]))
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
    return packed({"text": text, "role": role}, Observation(text, shown).images)


class ServedEnvironment:
    """An `Answerer` of a rank's questions."""

    def __init__(self, spec: str) -> None:
        """Raises OwnFileError."""
        self.spec = spec
        self.environment = loaded(spec)
        self.about = described(self.environment)
        try:
            json.dumps(self.about)
        except (TypeError, ValueError) as error:
            raise OwnFileError(f"{KEY} {spec}: its `tools` are no JSON: {error}") from None

    def answer(self, message: bytes) -> bytes:
        """`Answerer.answer`."""
        question, images = unpacked(message)
        try:
            return answered(self.environment, question, images)
        except BaseException as error:  # an exit and a canceled task, too
            fault = fault_of(KEY, self.spec, error)
            print(f"turns: {fault}", file=sys.stderr, flush=True)
            # The model reads what went wrong, and not where a person keeps files.
            reason = " ".join(str(error).split())[:MOST_SAID]
            return packed({"failed": f"{type(error).__name__}: {reason}", "fault": fault})
