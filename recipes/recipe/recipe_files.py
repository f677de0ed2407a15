"""Recipes and overrides in files of your own: `my.py:function`, `my.yaml` (base and overrides), `--set
@more.yaml`.

A YAML file is read once, where the command is given, and becomes plain overrides: the record of a run holds
those, so `resume` and `reproduce` do not depend on the file. A Python file is read again, from where it was.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from recipes.recipe.spec import Recipe
from trainer.config import ConfigError, from_dict
from trainer.config.overrides import read_yaml
from trainer.system.own_file import ROOT, OwnFileError, fault_of, load_named
from trainer.system.process_set import Guard, ProcessSet
from trainer.system.redaction import SECRET_NAME

YAML = (".yaml", ".yml")
STORED_NOTE = "in-the-bucket"
"""File beside a config.json whose model lies in a bucket: the key that nodes fetch it from, or nothing."""
CODE = ("rewards.function", "turns.environment")
"""Fields that name code of a file, from where the command is given."""
CODE_LIST = "rewards.functions"
"""The field that lists such code: each row's `path`."""
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
    absolute = []
    for before, argument in pairwise(["", *arguments]):
        option, _, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        path, equals, weight = value.rpartition("=")
        if not path or Path(value).exists():
            path = value
            equals = weight = ""
        made = "--out" in (before, option) and path and "://" not in path
        if path and (made or Path(path).exists()):
            argument = f"{option}{'=' if option else ''}{Path(path).absolute()}{equals}{weight}"
        absolute.append(argument)
    return absolute


def _absolute(assignment: str) -> str:
    """`data.source=mine.jsonl --images imgs` with absolute paths, where files of these names are here."""
    key, _, text = assignment.partition("=")
    key = key.strip()
    value = _value_of(text)
    if key in CODE:
        changed = _code(value)
    elif key == CODE_LIST and isinstance(value, list):
        changed = [row | {"path": _code(row.get("path"))} if isinstance(row, dict) else row for row in value]
    elif key in FOLDERS and value and Path(str(value)).is_dir():
        changed = str(Path(str(value)).absolute())
    elif key == "data.system_prompt" and str(value).startswith("@"):
        changed = _text_of(Path(str(value)[1:]))
    elif key == "data.source":
        changed = _absolute_words(str(value))
    else:
        return assignment
    if changed == value:
        return assignment
    return f"{key}={changed if _value_of(str(changed)) == changed else json.dumps(changed)}"


def _value_of(text: str) -> Any:
    """What the text of an override states; the text itself where it is no YAML, which is refused later."""
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return text


def _code(spec: Any) -> Any:
    """`file.py:name` with the file's path from the repository's root, where nodes find it, or its whole path
    if it is outside; unchanged where no such file is here."""
    file, colon, name = str(spec).rpartition(":")
    if not Path(file).is_file():
        return spec
    path = Path(file).absolute()
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}{colon}{name}"


def _absolute_words(source: str) -> str:
    """The words of `data.source` with absolute paths."""
    try:
        words = shlex.split(source)
    except ValueError:
        return source  # refused where it is read
    for i, word in enumerate(words):
        plain = (
            i and words[i - 1].startswith("--") and words[i - 1] not in ("--images", "--exclude", "--mirror")
        )
        if not plain and Path(word).exists():
            words[i] = str(Path(word).absolute())
    return shlex.join(words)


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
    settings: list[str] = []
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            settings += flatten(value, f"{path}.")
        else:
            settings.append(f"{path}={json.dumps(value, default=str)}")
    return settings


def from_python(reference: str) -> Recipe:
    """The recipe that the function of `file.py:function` returns, called in a process of its own as all code
    of people's. The file's folder can be imported from. Raises ConfigError."""
    harmless = {name: value for name, value in os.environ.items() if not SECRET_NAME.search(name)}
    process = ProcessSet(Guard(maker=MAKER, arguments=[reference], key="recipe", environment=harmless))
    try:
        return from_dict(Recipe, process.about()["recipe"], "recipe")
    finally:
        process.close()


class MadeRecipe:
    """What a process answers that was started for a recipe of a file."""

    def __init__(self, reference: str) -> None:
        """Raises OwnFileError."""
        make = load_named("recipe", reference)
        try:
            recipe = make()
        except BaseException as error:
            raise OwnFileError(fault_of("recipe", reference, error)) from None
        if not isinstance(recipe, Recipe):
            raise OwnFileError(
                f"{reference} returned {type(recipe).__name__}, and a recipe is recipes.recipe.spec.Recipe"
            )
        self.about = {"recipe": asdict(recipe)}


MAKER = f"{MadeRecipe.__module__}:{MadeRecipe.__name__}"
