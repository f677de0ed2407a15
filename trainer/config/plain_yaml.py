"""YAML whose words stay words: `off`, `on`, `yes` and `no` are text, as in YAML 1.2.

PyYAML follows YAML 1.1, where they are booleans: the choice `off` of an option would arrive as `false`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

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
