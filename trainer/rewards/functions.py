"""Reward functions of a user's: loaded from their files, called for one completion, their faults said in a
line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.rewards.call_signature import CallSignature
from trainer.system.own_file import OwnFileError, fault_of, load_named

KEY = "rewards.function"


class LoadedFunction:
    """One reward function."""

    def __init__(self, path: str, weight: float, name: str) -> None:
        """path: `path/to/file.py:function`. Raises OwnFileError."""
        self.path = path
        self.weight = weight
        self.name = name
        try:
            self.asking = CallSignature(load_named(KEY, path))
        except TypeError as error:
            raise OwnFileError(f"rewards.function {path}: {error}") from None

    def __call__(self, facts: Mapping[str, Any]) -> float | None:
        """Its reward, before the weight. Raises OwnFileError, which names exception and line."""
        try:
            return self.asking(facts)
        except BaseException as error:  # an exit and a canceled task, too
            raise OwnFileError(fault_of(KEY, self.path, error)) from None


def load_all(specs: str) -> list[LoadedFunction]:
    """The functions of a JSON list of {"path", "weight", "name"}. Raises OwnFileError."""
    return [LoadedFunction(**spec) for spec in json.loads(specs)]


def rewards_of(functions: Sequence[LoadedFunction], facts: Mapping[str, Any]) -> list[Any]:
    """[verdict, weighted sum, why, {name: value}] of one completion.

    A function that does not apply (None) adds nothing. One that fails makes the completion an `error`.
    """
    total = 0.0
    parts: dict[str, float] = {}
    for function in functions:
        try:
            value = function(facts)
        except OwnFileError as error:
            return ["error", 0.0, str(error), {}]
        if value is None:
            continue
        if not math.isfinite(value):
            return ["error", value, f"rewards.function {function.path}: it returned {value}", {}]
        parts[function.name] = value
        total += function.weight * value
    return ["correct" if total > 0 else "wrong", total, "", parts]
