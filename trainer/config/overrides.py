"""Frozen dataclass trees from plain data and back: typed, with `a.b=c` overrides, unknown keys refused by
name."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import re
import types
import typing
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Union

import yaml

from trainer.system.errors import ConfigError

BOOLEAN = "tag:yaml.org,2002:bool"
WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""What YAML 1.1 makes of these words; options that are true or false still take them."""


class WordLoader(yaml.SafeLoader):
    """PyYAML's safe loader, for which only `true` and `false` are booleans."""


WordLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != BOOLEAN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
WordLoader.add_implicit_resolver(BOOLEAN, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))

MOST_VALUES = 1_000_000
"""The most that a file may hold: a few nested aliases stand for billions."""


def read_yaml(text: str) -> Any:
    """Plain data of a YAML document. Raises yaml.YAMLError, also where its aliases make it endless or more
    than MOST_VALUES."""
    data = yaml.load(text, Loader=WordLoader)
    if _size(data, {}) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases make more than {MOST_VALUES:,} values of it")
    return data


def _size(value: Any, known: dict[int, float]) -> float:
    """Values of some data as they are written without aliases. known: sizes by id of what was counted."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # until it is counted: it may hold itself
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]


def from_dict(cls: Any, data: Any, where: str = "") -> Any:
    """Builds dataclass `cls` from plain data. Raises ConfigError on an unknown key or a value of the wrong
    type."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'the configuration'}: expected a mapping, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    values = {}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(unknown_key(f"{where}{key}", key, known))
        values[key] = _coerce(hints[key], value, f"{where}{key}")
    return cls(**values)


def unknown_key(path: str, key: str, known: list[str]) -> str:
    """The message for an unknown key, with the known one that it is spelled like. path: all that was given;
    key: its part that is unknown, the first or the last."""
    path, key = str(path), str(key)
    before = path.removesuffix(key) if path.endswith(key) else ""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {before}{near[0]}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {before}{key}: {hint}"


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if is_dataclass(hint):
        cls = typing.cast(type, hint)
        return _preset(cls(), value, where) if isinstance(value, str) else from_dict(cls, value, where + ".")
    if origin is Literal:
        choices = typing.get_args(hint)
        for choice in choices:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(str, choices))}")
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _coerce(next(a for a in typing.get_args(hint) if a is not type(None)), value, where)
    if origin in (tuple, list):
        args = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        if origin is tuple and args[-1] is not Ellipsis and len(args) != len(value):
            raise ConfigError(f"{where}: expected {len(args)} values, got {len(value)}")
        inner = [args[0] if args[-1] is Ellipsis or origin is list else args[i] for i in range(len(value))]
        return origin(
            _coerce(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(inner, value, strict=True))
        )
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 5e-7 as a string
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{where}: expected a number, got {value!r}") from None
    if origin is dict or hint is Any:
        return value
    if hint is bool and isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    if isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise ConfigError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {value!r}")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data of a configuration, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def override(config: Any, assignments: list[str]) -> Any:
    """Applies `a.b=c` assignments (values in YAML) to a frozen dataclass tree and returns the new tree.
    Raises ConfigError on an unknown key, naming the nearest known one."""
    for assignment in assignments:
        path, eq, text = assignment.partition("=")
        if not eq:
            raise ConfigError(f"--set {assignment}: write it as section.key=value")
        config = _set(config, path.strip().split("."), text.strip(), path.strip())
    return config


def _set(config: Any, keys: list[str], text: str, path: str) -> Any:
    known = [f.name for f in fields(config)]
    if keys[0] not in known:
        raise ConfigError(unknown_key(path, keys[0], known))
    child = getattr(config, keys[0])
    try:
        value = read_yaml(text) if text else ""
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: {text!r} cannot be read as YAML: put it in quotes of its own") from None
    if len(keys) == 1 and isinstance(value, str) and is_dataclass(child):
        return replace(config, **{keys[0]: _preset(child, value, path)})
    if len(keys) == 1:
        hint = typing.get_type_hints(type(config))[keys[0]]
        if hint is str and isinstance(value, bool | int | float | datetime.date):
            value = text  # a region called NO (false to YAML), a run called 2026
        return replace(config, **{keys[0]: _coerce(hint, value, path)})
    if not is_dataclass(child):
        raise ConfigError(f"{path}: {keys[0]} has no keys of its own")
    return replace(config, **{keys[0]: _set(child, keys[1:], text, path)})


def _preset(section: Any, name: str, where: str) -> Any:
    """A section with the options of one of its named sets; what the set leaves out stays as it is."""
    presets = getattr(section, "PRESETS", {})
    if name not in presets:
        known = f"one of {', '.join(presets)}" if presets else "a mapping; it has no named sets"
        raise ConfigError(f"{where}: {name!r} must be {known}")
    return replace(section, **presets[name])
