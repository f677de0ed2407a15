"""Recipes and overrides in files of your own: `my.py:function`, `my.yaml` (base and overrides), `--set
@more.yaml`.

A YAML file is read once, where the command is given, and becomes plain overrides: the record of a run holds
those, so `resume` and `reproduce` do not depend on the file. A Python file is read again, from where it was.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from recipes.recipe.spec import Recipe
from trainer.config import ConfigError
from trainer.config.plain_yaml import read_yaml

YAML = (".yaml", ".yml")
STORED_NOTE = "in-the-bucket"
"""File beside a config.json whose model lies in a bucket: the key that nodes fetch it from, or nothing."""
FOLDERS = ("model.path", "algorithm.teacher", "data.path", "evaluation.path", "storage.weights")
"""Fields that may name a folder from where the command is given."""


def expand_paths(recipe: str, assignments: list[str]) -> tuple[str, list[str]]:
    """Recipe and `--set` arguments without relative paths: (preset or `/path/file.py:function`, `a.b=c` ...).

    Overrides of a recipe file come before those of the command line, which win. Raises ConfigError.
    """
    given: list[str] = []
    for assignment in assignments:
        given += flatten(read_yaml_file(Path(assignment[1:]))) if assignment.startswith("@") else [assignment]
    name, given = _based(recipe, given, ())
    return name, [_absolute(assignment) for assignment in given]


def from_here(arguments: list[str]) -> list[str]:
    """The arguments of `data` with absolute paths: `mine.jsonl=2`, `--images=imgs`, and what `--out` is to
    make."""
    found = []
    for before, argument in pairwise(["", *arguments]):
        option, _, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        path, equals, weight = value.rpartition("=")
        if not path or Path(value).exists():
            path = value
            equals = weight = ""
        made = "--out" in (before, option) and path and "://" not in path
        if path and (made or Path(path).exists()):
            argument = f"{option}{'=' if option else ''}{Path(path).absolute()}{equals}{weight}"
        found.append(argument)
    return found


def _absolute(assignment: str) -> str:
    """`data.source=mine.jsonl --images imgs` with absolute paths, where files of these names are here."""
    key, _, text = assignment.partition("=")
    if key.strip() in FOLDERS and Path(text).is_dir() and text.strip():
        return f"{key}={Path(text).absolute()}"
    if key.strip() == "data.system_prompt" and text.startswith("@"):
        return f"{key}={json.dumps(_text_of(Path(text[1:])))}"
    if key.strip() != "data.source":
        return assignment
    try:
        words = shlex.split(str(read_yaml(text)))
    except (ValueError, yaml.YAMLError):
        return assignment  # refused where it is read
    for i, word in enumerate(words):
        path, equals, weight = ("", "", "") if Path(word).exists() else word.rpartition("=")
        path = path or word
        plain = (
            i and words[i - 1].startswith("--") and words[i - 1] not in ("--images", "--exclude", "--mirror")
        )
        if not plain and Path(path).exists():
            words[i] = f"{Path(path).absolute()}{equals}{weight}"
    return f"{key}={json.dumps(shlex.join(words))}"


def _text_of(path: Path) -> str:
    """A file's text, so that a run does not depend on the file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.system_prompt=@{path}: {type(error).__name__}; name a text file") from None


def _based(recipe: str, given: list[str], above: tuple[Path, ...]) -> tuple[str, list[str]]:
    folder = above[-1].parent if above else Path()
    if is_python(recipe):
        return str((folder / recipe).absolute()), given
    if not recipe.endswith(YAML):
        return recipe, given
    path = (folder / recipe).absolute()
    if path in above:
        raise ConfigError(f"{path}: its base leads back to it")
    values = read_yaml_file(path)
    base = values.pop("base", None)
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: base is missing: name the recipe that it changes, see `python3 launch.py list`"
        )
    return _based(base, flatten(values) + given, (*above, path))


def is_python(recipe: str) -> bool:
    """Whether a recipe's name is that of a Python file."""
    return recipe.endswith(".py") or ".py:" in recipe


def read_yaml_file(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping. Raises ConfigError."""
    try:
        values = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: write a mapping of sections, for example `rollout: {{max_tokens: 4096}}`")
    return values


def flatten(values: dict[Any, Any], above: str = "") -> list[str]:
    """`{a: {b: c}}` as `a.b=c`; values are JSON, which is YAML too."""
    found: list[str] = []
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            found += flatten(value, f"{path}.")
        else:
            found.append(f"{path}={json.dumps(value, default=str)}")
    return found


def from_python(reference: str) -> Recipe:
    """Calls the function of `file.py:function`. The file's folder can be imported from. Raises
    ConfigError."""
    name, _, function = reference.rpartition(":")
    path = Path(name)
    if not name or not function:
        raise ConfigError(f"{reference}: name the function that returns the recipe, {reference}:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"{path} is not there")
    spec = importlib.util.spec_from_file_location(f"recipe_file_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        recipe = make() if callable(make) else None
    except ConfigError:
        raise
    except Exception as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{reference} failed: {type(error).__name__}: {what}") from error
    if not callable(make):
        raise ConfigError(f"{path} has no function {function}")
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{reference} returned {type(recipe).__name__}, and a recipe is recipes.recipe.spec.Recipe"
        )
    return recipe
