"""Finds images that training data shares with an evaluation set, by content: scaled or re-encoded ones
count, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from data_prep.checks.split import near_pairs, stacked
from data_prep.checks.validate import CheckedRow, question_hash
from data_prep.ingest.images import ImageFacts, inspect, levels
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text
from trainer.images.decoding import ImageLimits, decode_image

DETAIL = ((160, 64, 42), (0, 24, 22))
"""(shortest side in pixels, cells a side, levels): how a near pair is compared again.

Measured on drawings and tables: the same image at half size or as a JPEG of quality 50 differs by at
most 36 levels in a cell; one with another number in the same drawing differs by more in 88 of 89 cases.
Below 160 pixels half size differs by up to 20, another number by less."""


def same_image(first: bytes, second: bytes) -> bool:
    """Whether two images that look alike as thumbnails are the same one, scaled or re-encoded."""
    image, other = decode_image(first, ""), decode_image(second, "")
    short = min(*image.size, *other.size)
    for shortest, side, within in DETAIL:
        if short >= shortest:
            differences = np.abs(levels(image, side) - levels(other, side))
            return bool(differences.max() <= within)
    return False


class EvaluationSet:
    """The images of a prepared evaluation set, with which training images are compared."""

    def __init__(self, path: str) -> None:
        """Reads the images of all splits."""
        manifest = read_manifest(path)
        self.name = manifest.name
        self._splits = {split: Dataset(path, split) for split in manifest.rows}
        self._places: list[tuple[str, int, int]] = []
        self.rows: list[tuple[str, str]] = []
        """(id, source) of each image's row."""
        self.sources = Counter[str]()
        """Number of rows of each source, with images or without."""
        self.texts: dict[bytes, tuple[str, str]] = {}
        """Hash of the question -> (id, source), for rows without images."""
        looks: list[str] = []
        for split, dataset in self._splits.items():
            for number, row in enumerate(dataset):
                self.sources[row.source] += 1
                if not row.images:
                    self.texts[question_hash(question_text(row.messages))] = row.id, row.source
                for k, image in enumerate(row.images):
                    facts = inspect(image, ImageLimits())
                    if not facts.error:
                        self._places.append((split, number, k))
                        self.rows.append((row.id, row.source))
                        looks.append(facts.look)
        self._looks = stacked(looks)

    def _image(self, number: int) -> bytes:
        split, row, k = self._places[number]
        return self._splits[split][row].images[k]

    def near(self, looks: Sequence[str], read: Callable[[int], bytes]) -> dict[int, list[int]]:
        """Our image -> the images of this set that are the same.

        Our images are given by their thumbnails `looks`; `read` gives their content.
        """
        same: dict[int, list[int]] = {}
        for pairs in near_pairs(stacked(looks), self._looks):
            for i, j in pairs.tolist():
                if same_image(read(i), self._image(j)):
                    same.setdefault(i, []).append(j)
        return same

    def touched(self, hits: Iterable[int]) -> dict[str, int]:
        """Number of rows of this set, by source, that have one of the images `hits` of this set."""
        rows = set()
        for hit in hits:
            rows.add(self.rows[hit])
        return dict(Counter(source for _, source in rows).most_common())


def mark_overlaps(
    rows: Sequence[CheckedRow],
    facts: dict[str, ImageFacts],
    exclude: Sequence[str],
    read: Callable[[str], bytes],
) -> list[dict[str, Any]]:
    """Marks kept rows with an image (or, having none, the question) of an evaluation set as `overlap`;
    reports per set.

    `read` gives an image's content by its sha256.
    """
    return [_mark(rows, facts, EvaluationSet(path), read) for path in exclude]


def _mark(
    rows: Sequence[CheckedRow],
    facts: dict[str, ImageFacts],
    evaluation: EvaluationSet,
    read: Callable[[str], bytes],
) -> dict[str, Any]:
    """Marks the rows that overlap with one evaluation set; reports on them."""
    ours = [sha for sha, image in facts.items() if image.look]

    def content(number: int) -> bytes:
        return read(ours[number])

    hits_of = evaluation.near([facts[sha].look for sha in ours], content)
    matches = {}  # sha256 of our image -> (id, source) of the first row that has it
    for number, hits in hits_of.items():
        matches[ours[number]] = evaluation.rows[hits[0]]

    marked = 0
    same_questions = set[tuple[str, str]]()
    for row in rows:
        if row.reason:
            continue
        same_images = [matches[sha] for sha in row.images if sha in matches]
        same_question = None if row.images else evaluation.texts.get(row.question)
        if same_images:
            row_id, source = same_images[0]
            row.reason = f"overlap: its image is that of {source} row {row_id}"
            marked += 1
        elif same_question:
            row_id, source = same_question
            row.reason = f"overlap: its question is that of {source} row {row_id}"
            marked += 1
            same_questions.add(same_question)

    touched = Counter(evaluation.touched(chain.from_iterable(hits_of.values())))
    for _, source in same_questions:
        touched[source] += 1
    return {"set": evaluation.name, "rows_excluded": marked, "evaluation_rows_touched": dict(touched)}


def overlap_report(path: str, evaluation: str) -> dict[str, Any]:
    """Compares two prepared datasets without changing either.

    Returns:
        {"rows", "rows_near": rows of `path` with an image that `evaluation` has, "by_source",
        "evaluation_rows", "evaluation_rows_touched": by source, "same_sources": sub-sources that both name}.
    """
    theirs = EvaluationSet(evaluation)
    near: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    touched: list[int] = []  # images of the evaluation set
    for split in read_manifest(path).rows:
        dataset = Dataset(path, split)
        places: list[tuple[int, int]] = []  # (row, image) of each thumbnail
        looks: list[str] = []
        for number, row in enumerate(dataset):
            sources[row.source] += 1
            for k, image in enumerate(row.images):
                if look := inspect(image, ImageLimits()).look:
                    places.append((number, k))
                    looks.append(look)
        hits = theirs.near(looks, partial(_image_at, dataset, places))
        for number in sorted({places[i][0] for i in hits}):
            near[dataset[number].source] += 1
        touched += chain.from_iterable(hits.values())
    return {
        "rows": sum(sources.values()),
        "rows_near": sum(near.values()),
        "by_source": dict(near.most_common()),
        "evaluation_rows": sum(theirs.sources.values()),
        "evaluation_rows_touched": theirs.touched(touched),
        "same_sources": _same_sources(sources, theirs.sources),
    }


def _image_at(dataset: Dataset, places: Sequence[tuple[int, int]], number: int) -> bytes:
    row, image = places[number]
    return dataset[row].images[image]


def _same_sources(ours: Counter[str], theirs: Counter[str]) -> dict[str, dict[str, int]]:
    """Sub-sources by their name without case and punctuation: {name: {"rows": ours, "evaluation_rows":
    theirs}}."""

    def key(source: str) -> str:
        name = source.rpartition("/")[2].casefold()
        return "".join(filter(str.isalnum, name))

    named = {}
    rows = Counter[str]()
    evaluation_rows = Counter[str]()
    for source, count in ours.items():
        rows[key(source)] += count
    for source, count in theirs.items():
        evaluation_rows[key(source)] += count
        if "/" in source:
            named[key(source)] = source.rpartition("/")[2]

    shared = {}
    for k in sorted(named):
        if rows[k]:
            shared[named[k]] = {"rows": rows[k], "evaluation_rows": evaluation_rows[k]}
    return shared
