"""Images that training data shares with an evaluation set, by content: the same bytes or nearly the same look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_prep.checks.split import near_pairs, stacked
from data_prep.checks.validate import Judged
from data_prep.ingest.images import ImageFacts, ImageLimits, inspect
from trainer.data.dataset import Dataset, read_manifest


def evaluation_looks(path: str) -> tuple[list[str], list[str], np.ndarray]:
    """Row ids, sources and thumbnails [images, places] of all images of a prepared dataset, all splits."""
    ids: list[str] = []
    sources: list[str] = []
    looks: list[str] = []
    for split in read_manifest(path).rows:
        for row in Dataset(path, split):
            for image in row.images:
                image = inspect(image, ImageLimits())
                if not image.error:
                    ids.append(row.id)
                    sources.append(row.source)
                    looks.append(image.look)
    return ids, sources, stacked(looks)


def near_rows(facts: dict[str, ImageFacts], path: str) -> tuple[dict[str, tuple[str, str]], dict[str, int]]:
    """Which of our images the evaluation set at `path` nearly has.

    Returns:
        sha256 of our image -> (row id, source) of the evaluation row; and per evaluation source, how many of its
        rows have a near-identical image among ours.
    """
    ids, sources, theirs = evaluation_looks(path)
    ours = [sha for sha, image in facts.items() if image.look]
    pairs = near_pairs(stacked([facts[sha].look for sha in ours]), theirs)
    matches: dict[str, tuple[str, str]] = {}
    for i, j in pairs.tolist():
        matches.setdefault(ours[i], (ids[j], sources[j]))
    touched = {(ids[j], sources[j]) for j in pairs[:, 1].tolist()}
    return matches, dict(Counter(source for _, source in touched).most_common())


def mark_overlaps(rows: Sequence[Judged], facts: dict[str, ImageFacts], exclude: Sequence[str]) -> list[dict[str, Any]]:
    """Marks kept rows with an image that an evaluation set nearly has as `overlap`, and reports per set."""
    report = []
    for path in exclude:
        matches, sources = near_rows(facts, path)
        marked = 0
        for row in rows:
            hit = next((matches[sha] for sha in row.images if sha in matches), None)
            if hit and not row.reason:
                row.reason = f"overlap: its image is nearly that of {hit[1]} row {hit[0]}"
                marked += 1
        report.append({"set": read_manifest(path).name, "rows_excluded": marked, "evaluation_rows_touched": sources})
    return report


def overlap_report(path: str, evaluation: str) -> dict[str, Any]:
    """Compares two prepared datasets without changing either.

    Returns:
        {"rows", "rows_near": rows of `path` with an image that `evaluation` nearly has, "by_source",
        "evaluation_rows", "evaluation_rows_touched": by source, "same_sources": sub-sources that both name}.
    """
    evaluation_sources: Counter[str] = Counter()
    for split in read_manifest(evaluation).rows:
        evaluation_sources.update(Dataset(evaluation, split).column("source"))
    near: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    ids, names, theirs = evaluation_looks(evaluation)
    touched: set[tuple[str, str]] = set()
    for split in read_manifest(path).rows:
        batch: list[tuple[str, str]] = []
        for row in Dataset(path, split):
            sources[row.source] += 1
            looks = [p.look for p in (inspect(image, ImageLimits()) for image in row.images) if p.look]
            batch += [(row.source, one) for one in looks[:1]]
            if len(batch) == 4096:
                touched |= _compare(batch, theirs, ids, names, near)
                batch = []
        touched |= _compare(batch, theirs, ids, names, near)
    return {
        "rows": sum(sources.values()),
        "rows_near": sum(near.values()),
        "by_source": dict(near.most_common()),
        "evaluation_rows": sum(evaluation_sources.values()),
        "evaluation_rows_touched": dict(Counter(source for _, source in touched).most_common()),
        "same_sources": _same_sources(sources, evaluation_sources),
    }


def _compare(
    batch: list[tuple[str, str]], theirs: np.ndarray, ids: list[str], names: list[str], near: Counter[str]
) -> set[tuple[str, str]]:
    if not batch:
        return set()
    pairs = near_pairs(stacked([one for _, one in batch]), theirs)
    near.update(batch[i][0] for i in set(pairs[:, 0].tolist()))
    return {(ids[j], names[j]) for j in pairs[:, 1].tolist()}


def _same_sources(ours: Counter[str], theirs: Counter[str]) -> dict[str, dict[str, int]]:
    """Sub-sources by their name without case and punctuation: {name: {"rows": ours, "evaluation_rows": theirs}}."""

    def key(source: str) -> str:
        return "".join(c for c in source.rpartition("/")[2].casefold() if c.isalnum())

    named = {key(source): source.rpartition("/")[2] for source in theirs if "/" in source}
    mine, other = Counter[str](), Counter[str]()
    for source, rows in ours.items():
        mine[key(source)] += rows
    for source, rows in theirs.items():
        other[key(source)] += rows
    return {named[k]: {"rows": mine[k], "evaluation_rows": other[k]} for k in sorted(named) if mine[k]}
