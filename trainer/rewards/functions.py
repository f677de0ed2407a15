"""Reward functions of a user's: loaded from their files, called for one completion, their faults said in a
line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.rewards.call_signature import CallSignature


class FunctionError(Exception):
    """What is wrong with a function or its file, on one line."""


class LoadedFunction:
    """One reward function."""

    def __init__(self, path: str, weight: float, name: str) -> None:
        """path: `path/to/file.py:function`. Raises FunctionError."""
        self.path = path
        self.weight = weight
        self.name = name
        try:
            self.asking = CallSignature(load_function(path))
        except TypeError as error:
            raise FunctionError(f"rewards.function {path}: {error}") from None

    def __call__(self, facts: Mapping[str, Any]) -> float | None:
        """Its reward, before the weight. Raises FunctionError, which names exception and line."""
        try:
            return self.asking(facts)
        except (Exception, SystemExit) as error:
            where = at_fault(error, self.path.rpartition(":")[0])
            said = " ".join(str(error).split())[:300]
            raise FunctionError(
                f"rewards.function {self.path}: {type(error).__name__}: {said}{where}"
            ) from None


def load_all(specs: str) -> list[LoadedFunction]:
    """The functions of a JSON list of {"path", "weight", "name"}. Raises FunctionError."""
    return [LoadedFunction(**spec) for spec in json.loads(specs)]


def load_function(spec: str) -> Callable[..., Any]:
    """The function of `path/to/file.py:function`. Raises FunctionError that says what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise FunctionError(
            f"rewards.function {spec!r}: write path/to/file.py:function, with a file that exists"
        )
    module_name = "user_reward_" + Path(path).stem
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise FunctionError(f"rewards.function: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickles look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise FunctionError(f"rewards.function {spec}: {said}{at_fault(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise FunctionError(f"rewards.function: {path} has no function {name!r}")
    return function


def at_fault(error: BaseException, path: str) -> str:
    """The last line of a file that an exception passed, as " (file.py:3)"; empty where it passed none."""
    own = Path(path).resolve()
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == own:
        return f" ({own.name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve() == own:
            return f" ({own.name}:{frame.lineno})"
    return ""


def rewards_of(functions: Sequence[LoadedFunction], facts: Mapping[str, Any]) -> list[Any]:
    """[verdict, weighted sum, why, {name: value}] of one completion.

    A function that does not apply (None) adds nothing. One that fails makes the completion an `error`.
    """
    total = 0.0
    parts: dict[str, float] = {}
    for function in functions:
        try:
            value = function(facts)
        except FunctionError as error:
            return ["error", 0.0, str(error), {}]
        if value is None:
            continue
        if not math.isfinite(value):
            return ["error", value, f"rewards.function {function.path}: it returned {value}", {}]
        parts[function.name] = value
        total += function.weight * value
    return ["correct" if total > 0 else "wrong", total, "", parts]
