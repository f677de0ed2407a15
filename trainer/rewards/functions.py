"""Reward functions of a user's: loaded from their files, called with what they ask for by name, their faults
said in a line.

    def reward(text, reference): ...                                      one completion
    def reward(completions, ground_truth, **kwargs): ...                  TRL: lists, one entry a completion
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...   verl

Each call is about one completion; a function of lists gets lists of one.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.system.own_file import OwnFileError, fault_of, load_named, result_of

KEY = "rewards.function"
OURS = {
    "text": ("text", "completion", "response", "solution_str", "predict_str"),
    "question": ("question", "prompt"),
    "answer_type": ("answer_type", "kind"),
    "image_count": ("image_count", "images"),
    "source": ("source", "data_source"),
    "extra": ("extra", "extra_info"),
    "id": ("id",),
}
"""Fact of a completion -> the parameters that get it, whatever the row's columns are called."""
UNLESS_A_COLUMN = {"reference": ("reference", "ground_truth", "answer", "label"), "solution": ("solution",)}
"""The same, where the row has no column of the name."""
OF_LISTS = {
    "completions": "text",
    "prompts": "question",
    "completion_ids": "completion_ids",
    "solution_strs": "text",
    "ground_truths": "reference",
    "data_sources": "source",
    "extra_infos": "extra",
}
"""Parameters of functions of lists -> the fact that each entry is."""
IN_ORDER = ("text", "reference", "answer_type")
"""What a function of three parameters gets whose names are all its own."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ChatText(str):
    """A text that is a chat of one turn, too: `turn[0]["content"]` is all of it. TRL's examples read
    completions as either."""

    role = "assistant"

    def __getitem__(self, key: Any) -> Any:
        if key == "content":
            return str(self)
        if key == "role":
            return self.role
        if isinstance(key, int):
            if not -max(len(self), 1) <= key < max(len(self), 1):
                raise IndexError("string index out of range")
            return _Entry(str(self)[key : key + 1 or None], self)
        return str(self)[key]


class _Entry(ChatText):
    """One character of a turn, or the turn as an entry of its chat."""

    def __new__(cls, character: str, whole: ChatText) -> _Entry:
        entry = super().__new__(cls, character)
        entry.whole = whole
        return entry

    whole: ChatText

    def __getitem__(self, key: Any) -> Any:
        return self.whole[key] if isinstance(key, str) else str(self)[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.whole[key] if key in ("content", "role") else default


class CallSignature:
    """A reward function, and the parameters that it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError for one whose parameters cannot be known."""
        self.function = function
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            raise TypeError("its parameters cannot be read: wrap it in a function of Python") from None
        self.named = [p for p in parameters if p.kind not in LOOSE]
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = [p.name for p in self.named]
        self.of_lists = any(name in OF_LISTS for name in names)
        if not names and not self.takes_all:
            raise TypeError("it has no parameters: let it take `text` and `reference`, or `completions`")
        known = {name for aliases in (OURS | UNLESS_A_COLUMN).values() for name in aliases} | OF_LISTS.keys()
        required = [p for p in self.named if p.default is p.empty]
        self.in_order = (
            len(required) == len(IN_ORDER)
            and not known & set(names)
            and not self.takes_all
            and all(p.kind in POSITIONAL for p in required)
        )
        self.wants_ids = "completion_ids" in names

    def unknown(self, facts: Mapping[str, Any]) -> list[str]:
        """Parameters that it must be given, and that neither the row nor this program has."""
        if self.in_order:
            return []
        given = self._values(facts)
        return [p.name for p in self.named if p.default is p.empty and p.name not in given]

    def __call__(self, facts: Mapping[str, Any]) -> float | None:
        """The reward of one completion; None where the function says that it does not apply.

        Raises what the function raises, and TypeError for what it cannot be given or does not return.
        """
        if self.in_order:
            return returned_number(self.function(*(facts[name] for name in IN_ORDER)), of_lists=False)
        if missing := self.unknown(facts):
            raise TypeError(f"it asks for {', '.join(missing)}, and {available_arguments(facts)}")
        values = self._values(facts)
        positional = []
        named = {}
        for parameter in self.named:
            if parameter.name not in values:
                continue
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(values[parameter.name])
            else:
                named[parameter.name] = values[parameter.name]
        if self.takes_all:
            listed = {p.name for p in self.named}
            named |= {name: value for name, value in values.items() if name not in listed}
        return returned_number(self.function(*positional, **named), self.of_lists)

    def _values(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that may be passed, by the name of the parameter."""
        columns = dict(facts["extra"])
        values: dict[str, Any] = {}
        for fact, names in UNLESS_A_COLUMN.items():
            values |= dict.fromkeys(names, facts[fact])
        values |= columns
        for fact, names in OURS.items():
            values |= dict.fromkeys(names, facts[fact])
        if not self.of_lists:
            return values
        lists = {name: [value] for name, value in values.items() if name not in OURS["text"]}
        for name, fact in OF_LISTS.items():
            if fact in facts:
                value = facts[fact]
                if fact in ("text", "question"):
                    value = ChatText(value)
                    value.role = "user" if fact == "question" else "assistant"
                lists[name] = [value]
        return lists


def available_arguments(facts: Mapping[str, Any]) -> str:
    """What a function may ask for, for a message."""
    columns = ", ".join(facts["extra"]) or "none"
    ours = "text, reference, answer_type, question, image_count, source, id, solution, extra"
    return f"there is {ours}; the row's columns: {columns}"


def returned_number(returned: Any, of_lists: bool) -> float | None:
    """The number that a function returned: itself, that of a list of one, or `score` of a mapping (verl).

    Raises TypeError for anything else.
    """
    returned = result_of(returned)
    if hasattr(returned, "tolist"):  # of numpy or torch
        returned = returned.tolist()
    if of_lists:
        if not isinstance(returned, list | tuple) or len(returned) != 1:
            raise TypeError(f"it returned {returned!r:.80} for one completion: return a list of one number")
        (returned,) = returned
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise TypeError(f"it returned a mapping without `score`: {', '.join(map(str, returned))}")
        returned = returned["score"]
    if returned is None and of_lists:
        return None
    if isinstance(returned, str | bytes) or not hasattr(returned, "__float__"):
        raise TypeError(f"it returned {returned!r:.80}: return a number")
    return float(returned)


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
