"""Makes datasets from prepared ones: mixed by weights, filtered by pass rate, or with a run's
completions as solutions.

Rows keep their ids.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.write.shards import write_dataset
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import Manifest, Row


def mix(parts: Sequence[tuple[str, float]], out: str | Path, name: str, seed: int = 0) -> Manifest:
    """One dataset of several, shuffled: each row of a part is there weight times on average, in `train`.

    A weight of 2.5 gives every row twice and half of them, drawn by `seed`, a third time. Other splits
    are joined as they are.
    """
    mixed = []
    rows: dict[str, Iterable[Row]] = {}
    for path, weight in parts:
        manifest = read_manifest(path)
        mixed.append([manifest.fingerprint, weight])
        for split in manifest.rows:
            rows[split] = _mixed(parts, split, seed)
    settings = {"mixed": mixed, "seed": seed}
    return write_dataset(out, name, rows, settings)


def _mixed(parts: Sequence[tuple[str, float]], split: str, seed: int) -> Iterator[Row]:
    order: list[tuple[Dataset, int]] = []
    draw = random.Random(f"{seed}/{split}")
    for path, weight in parts:
        if split not in read_manifest(path).rows:
            continue
        dataset = Dataset(path, split)
        whole, part = divmod(weight, 1) if split == "train" else (1, 0)
        for row in range(len(dataset)):
            times = int(whole) + (draw.random() < part)
            order += [(dataset, row)] * times
    if split == "train":
        draw.shuffle(order)
    for dataset, row in order:
        yield dataset[row]


def pass_rate(row: Row) -> float | None:
    """A row's pass rate: the field of that name, or the first whose name says so; None where it has none."""
    fields = ["pass_rate"]
    for name in row.extra:
        if "pass" in name.lower() and "rate" in name.lower():
            fields.append(name)
    for name in fields:
        if row.extra.get(name) is not None:
            return float(row.extra[name])
    return None


def read_rates(path: str | Path) -> dict[str, float]:
    """Row id -> pass rate, from lines of {"id", "pass_rate"}. ConfigError where a line is another."""
    rates = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                rates[record["id"]] = float(record["pass_rate"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f'{path}, line {number}: not {{"id": ..., "pass_rate": ...}}') from None
    return rates


def keep_by_rate(
    path: str, out: str | Path, low: float, high: float, rates: dict[str, float] | None = None
) -> tuple[Manifest, dict[str, int]]:
    """The training rows with a pass rate from `low` to `high`; other splits as they are.

    Returns the manifest, and how many rows were kept, too hard, too easy, or had no rate (these are
    left out).
    """
    manifest = read_manifest(path)
    counts = Counter[str]()

    def chosen(split: str) -> Iterator[Row]:
        for row in Dataset(path, split):
            rate = rates.get(row.id) if rates is not None else pass_rate(row)
            if rate is None:
                verdict = "no rate"
            elif rate < low:
                verdict = "too hard"
            elif rate > high:
                verdict = "too easy"
            else:
                verdict = "kept"
            counts[verdict] += 1
            if verdict == "kept":
                yield dataclasses.replace(row, extra=row.extra | {"pass_rate": rate})

    settings: dict[str, Any] = {"filtered": manifest.fingerprint, "pass_rate": [low, high]}
    settings["rates"] = sorted(rates.items()) if rates is not None else "of the rows"
    rows: dict[str, Iterable[Row]] = {}
    for split in manifest.rows:
        rows[split] = chosen(split) if split == "train" else Dataset(path, split)
    return write_dataset(out, manifest.name, rows, settings, manifest.revision), dict(counts)


def read_completions(path: str | Path, ids: Sequence[str]) -> dict[str, str]:
    """Row id -> shortest correct completion, from a run's `samples.jsonl` or `pass_rates.jsonl`.

    ids: of the rows of the split that the run trained on: `samples.jsonl` names rows by their position
    in it. Raises ConfigError for another file, where its rows are not these, and for episodes of several
    turns.
    """
    shortest: dict[str, str] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                row = record["id"] if "id" in record else ids[record["row"]]
                text = record["completion"] if record.get("verdict", "correct") == "correct" else ""
                turns = bool(record.get("dialog"))
            except (ValueError, KeyError, TypeError, IndexError):
                raise ConfigError(
                    f"{path}, line {number}: no line of this dataset's samples.jsonl or pass_rates.jsonl"
                ) from None
            if turns:
                raise ConfigError(
                    f"{path}, line {number}: an episode of several turns, whose last reply alone is no worked"
                    " solution; write rows with `learned_turns`, as examples/zoom/framed.py does"
                )
            if text and len(text) < len(shortest.get(row, text + " ")):
                shortest[row] = text
    if unknown := shortest.keys() - set(ids):
        raise ConfigError(
            f"{path} has {len(unknown)} rows that are not in the dataset: name the one that the run used"
        )
    return shortest


def with_completions(path: str, out: str | Path, log: str | Path) -> tuple[Manifest, int]:
    """The training rows that a run solved, its correct completion as their solution.

    Other splits as they are.

    Returns the manifest, and how many training rows have no correct completion and are left out.
    """
    manifest = read_manifest(path)
    train = Dataset(path)
    completions = read_completions(log, train.column("id"))

    def solved() -> Iterator[Row]:
        for row in train:
            if row.id in completions:
                yield dataclasses.replace(row, solution=completions[row.id])

    rows: dict[str, Iterable[Row]] = {}
    for split in manifest.rows:
        rows[split] = solved() if split == "train" else Dataset(path, split)
    settings = {"worked": manifest.fingerprint, "completions": sorted(completions.items())}
    made = write_dataset(out, manifest.name, rows, settings, manifest.revision)
    return made, len(train) - made.rows["train"]
