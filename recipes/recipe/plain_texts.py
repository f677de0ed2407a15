"""Texts of a recipe that stand in task files as they are: no line of a batch script begins in one of them."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from trainer.config import ConfigError

WORD = re.compile(r"[^\x00-\x20\x7f-\x9f\"'`\\$;<>]*")
"""A name, a label, an image, an address or a feature expression of Slurm."""
PATH = re.compile(r"(?:[^\x00-\x1f\x7f-\x9f\"'`\\$;&|<>()]|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?)*")
"""A path, which may have blanks, and variables that are filled in where the task runs."""
PATHS = ("shared_dir", "ssh_key", "mount", "weights", "bucket")
SHELL = ("prelude",)
"""Lines of shell by their purpose."""


def check_texts(section: Any, prefix: str) -> None:
    """Raises ConfigError for a text that a shell, a batch system or a YAML file would take for more than a
    word. section: a dataclass of the recipe."""
    for option in fields(section):
        value = getattr(section, option.name)
        if option.name in SHELL:
            continue
        pattern = PATH if option.name in PATHS else WORD
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (text.startswith("-") or not pattern.fullmatch(text)):
                raise ConfigError(
                    f"{prefix}{option.name} is {text!r}, which would be read as more than one word: leave out"
                    " quotes, line breaks, `$(` and what else a shell obeys"
                )
