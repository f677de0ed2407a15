"""`data.source`: rows that a recipe prepares itself, in the place of the dataset that it is written for."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from recipes.presets.models_and_data import DATASETS, with_parts
from recipes.recipe.spec import DataFacts, Recipe, Step
from trainer.config import ConfigError

DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Endings that a name on the hub does not have."""
WHOLE_BYTES = 1 << 30
"""Largest .json document that is read to be counted, since it is one value and is parsed whole."""
HELD_OUT = ("validation", "test", "val", "dev", "testmini")
"""What splits that are held out are called, the likelier first."""


def with_own_rows(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with a step that prepares `data.source`; `overrides` say what the user set besides.

    Rows of files belong to one run, which a later change of the files does not touch; what is named (a
    published set, a repository of the hub, generated problems) is prepared once and shared by runs. Held-out
    rows are those of `validation`, where a source without splits has them. Raises ConfigError where the text
    has no words.
    """
    data, given = recipe.config.data, {text.partition("=")[0].strip() for text in overrides}
    if not data.source:
        return _of_a_prepared_folder(recipe, given) if "data.path" in given else recipe
    words = source_words(data.source)
    kept = hashlib.sha256(data.source.encode()).hexdigest()[:8]
    path = (
        data.path
        if "data.path" in given
        else "${DATA}/" + ("${RUN_ID}" if source_files(data.source) else f"own-{kept}")
    )
    former = f"{data.path}/manifest.json"
    steps = [step for step in recipe.steps if step.module != "data_prep" or step.creates != former]
    own = Step(creates=f"{path}/manifest.json", module="data_prep", args=("prepare", *words, "--out", path))
    sections: dict[str, dict] = {"data": {"path": path}}
    if not {"evaluation.split", "evaluation.path"} & given:
        sections["evaluation"] = {"split": "validation", "path": ""}
    # A name of the hub is whole, of a file's the folder is left out.
    name = PurePosixPath(words[0]).stem if source_files(data.source) else words[0]
    facts = _with_rows(recipe.dataset, name, count_rows(words))
    return replace(
        recipe,
        config=with_parts(recipe.config, **sections),
        steps=(own, *steps),
        dataset=replace(facts, held_out="validation"),
    )


def _of_a_prepared_folder(recipe: Recipe, given: set[str]) -> Recipe:
    """The recipe with a dataset that is there: no step prepares another one, and its manifest has the rows
    and the held-out split. given: keys that the user set. Raises ConfigError where nothing is held out."""
    data, used = recipe.config.data, {recipe.config.data.path, recipe.config.evaluation_path}
    steps = []
    for step in recipe.steps:
        if step.module != "data_prep" or step.creates.removesuffix("/manifest.json") in used:
            steps.append(step)
    if f"{data.path}/manifest.json" in {step.creates for step in steps}:
        return replace(recipe, steps=tuple(steps))
    try:
        manifest = (Path(data.path) / "manifest.json").read_text()
    except (OSError, ValueError):  # a bucket, or another machine's folder
        return replace(recipe, steps=tuple(steps), dataset=_with_rows(recipe.dataset, data.path, None))
    facts = _with_rows(recipe.dataset, data.path, rows_of_manifest(manifest, data.split))
    recipe = replace(recipe, steps=tuple(steps), dataset=facts)
    evaluation = recipe.config.evaluation
    chosen = {"evaluation.split", "evaluation.path", "evaluation.every_steps"} & given
    if chosen or evaluation.path or not evaluation.every_steps:
        return recipe
    split = held_out_split(manifest, evaluation.split, data.split)
    config = with_parts(recipe.config, evaluation={"split": split})
    return replace(recipe, config=config, dataset=replace(facts, held_out=split))


def held_out_split(manifest: str, wanted: str, trained: str) -> str:
    """The split of a prepared dataset to evaluate on: the wanted one where it is there, else what is held out
    by its usual names; `wanted` where the manifest has no splits. Raises ConfigError where all rows are
    trained on."""
    splits = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        splits = list(json.loads(manifest)["rows"])
    for name in (wanted, *HELD_OUT) if splits else (wanted,):
        if name != trained and (name in splits or not splits):
            return name
    raise ConfigError(
        f"data.path has no rows that are held out (it has {', '.join(splits)}), and the run evaluates:"
        " prepare it again with `--validation 0.02` and rows that do not all show one image, name another set"
        " by evaluation.path, or set evaluation.every_steps=0"
    )


def check_there(recipe: Recipe) -> None:
    """Raises ConfigError where a recipe trains on rows that none of its steps prepares and nobody
    publishes."""
    data, made = recipe.config.data.path, {step.creates for step in recipe.steps}
    if recipe.kind == "train" and data.startswith("${DATA}") and f"{data}/manifest.json" not in made:
        raise ConfigError(
            f"{recipe.name} trains on rows that nobody publishes: make them from a run of yours "
            "(docs/sft.md), and set data.path to the folder"
        )


def rows_of_manifest(text: str, split: str) -> int | None:
    """Rows of a split, from a prepared dataset's manifest; None where it does not say."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text)["rows"][split])
    return None


def _with_rows(planned: DataFacts, name: str, rows: int | None) -> DataFacts:
    """The facts of a dataset of that name; where its rows are not known, those that were planned stay, and it
    is said."""
    if rows is not None:
        return replace(planned, name=name, rows=rows)
    guess = (
        f"nobody here knows how many rows {name} has: planned as {planned.rows:,}, those of {planned.name}"
    )
    return replace(planned, name=name, guess=guess)


def count_rows(words: Sequence[str]) -> int | None:
    """How many rows a source has, as far as the desk can tell; else None.

    Files are counted; of a published set the catalog of recipes knows. `--rows` limits both. What preparing
    leaves out or holds out of them is not known before.
    """
    limit = next((int(after) for word, after in pairwise(words) if word == "--rows" and after.isdigit()), 0)
    counted = 0
    options = False
    for word in words:
        options = options or word.startswith("-")
        rows = DATASETS[word].rows if word in DATASETS else rows_in(Path(word))
        if rows is not None:
            counted += rows
        elif not options:
            return limit or None
    return min(counted, limit) if limit else counted


def source_words(source: str) -> list[str]:
    """The words of `data.source`. Raises ConfigError for an open quote, and where no source is named."""
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise ConfigError(f"data.source {source!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise ConfigError(
            f"data.source {source!r}: name a source first, then its options: `mine.jsonl --map ...`"
        )
    if not words[0].startswith("/") and PurePosixPath(words[0].partition("=")[0]).suffix in DATA_FILES:
        raise ConfigError(f"data.source: there is no file {words[0]} where you are")
    if {"--out", "--name", "--dry-run", "--list"} & {word.partition("=")[0] for word in words}:
        raise ConfigError(f"data.source {source!r}: the run itself says where its rows go; set data.path")
    return words


def source_files(source: str) -> list[str]:
    """The words of `data.source` that name files: absolute ones, as the command line makes them."""
    return [word for word in source_words(source) if word.startswith("/")]


def rows_in(path: Path) -> int | None:
    """Rows of a file, by its ending as `launch.py data prepare` reads it; None where they cannot be
    counted."""
    try:
        match path.suffix:
            case ".jsonl" | ".ndjson":
                with path.open("rb") as file:
                    return sum(1 for line in file if line.strip())
            case ".csv" | ".tsv":
                return _records(path, "\t" if path.suffix == ".tsv" else ",")
            case ".json":
                return _objects(json.loads(path.read_bytes())) if path.stat().st_size < WHOLE_BYTES else None
            case ".parquet":
                return _parquet(path)
    except (OSError, ValueError, IndexError, csv.Error, RecursionError):
        return None  # preparing says what is wrong with it
    return None


def _records(path: Path, delimiter: str) -> int:
    """Records below a header; one may go over several lines."""
    csv.field_size_limit(1 << 30)  # images may be inside, in base64
    with path.open(newline="", encoding="utf-8-sig") as file:
        records = sum(1 for record in csv.reader(file, delimiter=delimiter) if record)
    return max(0, records - 1)


def _objects(whole: Any) -> int:
    """Rows of a document: a list, an object with one list of objects inside, or objects by their id."""
    if isinstance(whole, list):
        return len(whole)
    if not isinstance(whole, dict):
        return 1
    lists = [
        value for value in whole.values() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    return len(lists[0]) if len(lists) == 1 else len(whole)


def _parquet(path: Path) -> int | None:
    """The rows that a Parquet file's footer names; None where this Python has nothing that reads it."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return None
    try:
        return parquet.read_metadata(path).num_rows
    except ArrowException:
        return None
