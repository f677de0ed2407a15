"""`data.source`: rows that a recipe prepares itself, in the place of the dataset that it is written for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath

from recipes.presets.parts import DATASETS, with_parts
from recipes.spec import Recipe, Step
from trainer.config import ConfigError

DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Endings that a name on the hub does not have."""


def prepared(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with a step that prepares `data.source`; `overrides` say what the user set besides.

    Rows of files belong to one run, which a later change of the files does not touch; what is named (a
    published set, a repository of the hub, generated problems) is prepared once and shared by runs. Held-out
    rows are those of `validation`, where a source without splits has them. Raises ConfigError where the text
    has no words.
    """
    data, given = recipe.config.data, {text.partition("=")[0].strip() for text in overrides}
    if not data.source:
        return _of_a_prepared_folder(recipe) if "data.path" in given else recipe
    words = words_of(data.source)
    kept = hashlib.sha256(data.source.encode()).hexdigest()[:8]
    path = (
        data.path
        if "data.path" in given
        else "${DATA}/" + ("${RUN_ID}" if files_of(data.source) else f"own-{kept}")
    )
    former = f"{data.path}/manifest.json"
    steps = [step for step in recipe.steps if step.module != "data_prep" or step.creates != former]
    own = Step(creates=f"{path}/manifest.json", module="data_prep", args=("prepare", *words, "--out", path))
    sections: dict[str, dict] = {"data": {"path": path}}
    if not {"evaluation.split", "evaluation.path"} & given:
        sections["evaluation"] = {"split": "validation", "path": ""}
    name = PurePosixPath(words[0]).stem if words else ""
    return replace(
        recipe,
        config=with_parts(recipe.config, **sections),
        steps=(own, *steps),
        dataset=replace(recipe.dataset, name=name, rows=rows_of(words, recipe), held_out="validation"),
    )


def _of_a_prepared_folder(recipe: Recipe) -> Recipe:
    """The recipe with a dataset that is there: no step prepares another one, and its manifest has the
    rows."""
    data, used = recipe.config.data, {recipe.config.data.path, recipe.config.evaluation_path}
    steps = []
    for step in recipe.steps:
        if step.module != "data_prep" or step.creates.removesuffix("/manifest.json") in used:
            steps.append(step)
    rows = recipe.dataset.rows
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # a bucket, or another machine's folder
        rows = int(json.loads((Path(data.path) / "manifest.json").read_text())["rows"][data.split])
    return replace(recipe, steps=tuple(steps), dataset=replace(recipe.dataset, rows=rows))


def rows_of(words: Sequence[str], recipe: Recipe) -> int:
    """How many rows a source has, as far as the desk can tell; else those of the recipe's own dataset.

    Lines are counted in files of lines; of a published set the catalog of recipes knows. `--rows` limits
    both. What preparing leaves out or holds out of them is not known before.
    """
    limit = next((int(after) for word, after in pairwise(words) if word == "--rows" and after.isdigit()), 0)
    counted = 0
    for word in words:
        named = word.rpartition("=")[0]  # what stands behind the last `=` may be a weight
        path = named if named and not Path(word).exists() else word
        if PurePosixPath(path).suffix in (".jsonl", ".ndjson", ".csv", ".tsv") and Path(path).is_file():
            with open(path, "rb") as file:
                lines = sum(1 for line in file if line.strip())
            counted += lines - (PurePosixPath(path).suffix in (".csv", ".tsv"))
        elif word in DATASETS:
            counted += DATASETS[word].rows
    if not counted:
        return limit or recipe.dataset.rows
    return min(counted, limit) if limit else counted


def words_of(source: str) -> list[str]:
    """The words of `data.source`. Raises ConfigError for an open quote, and where no source is named."""
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise ConfigError(f"data.source {source!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise ConfigError(
            f"data.source {source!r}: name a source first, then its options: `mine.jsonl --map ...`"
        )
    if (
        not words[0].startswith("/")
        and PurePosixPath(words[0].rpartition("=")[0] or words[0]).suffix in DATA_FILES
    ):
        raise ConfigError(f"data.source: there is no file {words[0]} where you are")
    if {"--out", "--name", "--dry-run", "--list"} & {word.partition("=")[0] for word in words}:
        raise ConfigError(f"data.source {source!r}: the run itself says where its rows go; set data.path")
    return words


def files_of(source: str) -> list[str]:
    """The words of `data.source` that name files: absolute ones, as the command line makes them."""
    return [word for word in words_of(source) if word.startswith("/")]
