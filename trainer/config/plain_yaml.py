"""YAML whose words stay words: `off`, `on`, `yes` and `no` are text, as in YAML 1.2.

PyYAML follows YAML 1.1, where they are booleans: the choice `off` of an option would arrive as `false`.
"""

from __future__ import annotations

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


def read_yaml(text: str) -> Any:
    """Plain data of a YAML document. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=WordLoader)
