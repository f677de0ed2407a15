"""YAML of task files: shell as blocks, a comment above."""

from __future__ import annotations

from typing import Any

import yaml


class Dumper(yaml.SafeDumper):
    """Shell blocks as blocks, no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


Dumper.add_representer(str, _text)


def to_yaml(data: dict[str, Any], head: str = "") -> str:
    """YAML with a comment above it."""
    comment = "".join(f"# {line}\n" if line else "#\n" for line in head.splitlines())
    return comment + yaml.dump(data, Dumper=Dumper, sort_keys=False, width=1000)
