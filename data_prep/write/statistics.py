"""Counts of a prepared dataset, and the tables of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from data_prep.checks.validate import CheckedRow
from data_prep.ingest.images import ImageFacts
from trainer.data.schema import Manifest

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


def percentiles(values: Sequence[int]) -> dict[str, int]:
    """Nearest-rank percentiles, keyed by their number; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    values_at = {}
    for percent in PERCENTILES:
        rank = math.ceil(percent * len(ordered) / 100)
        values_at[str(percent)] = ordered[max(0, rank - 1)]
    return values_at


def histogram(values: Sequence[int], edges: Sequence[int]) -> dict[str, int]:
    """Counts of values below each edge and from the last one on, keyed `<edge` and `>=edge`."""
    labels = [f"<{edge}" for edge in edges]
    labels.append(f">={edges[-1]}")
    counts = dict.fromkeys(labels, 0)
    for value in values:
        counts[labels[bisect_right(edges, value)]] += 1
    return counts


def _rejected(rows: Sequence[CheckedRow]) -> dict[str, dict[str, Any]]:
    """Reference answers that the grader cannot use: {type: {"rows", "examples"}}."""
    bad: dict[str, list[str]] = {}
    for row in rows:
        if row.reason.startswith("bad_answer") or row.found == "bad_answer":
            bad.setdefault(row.answer_type, []).append(row.answer)
    return {kind: {"rows": len(answers), "examples": answers[:3]} for kind, answers in bad.items()}


def collect(
    rows: Sequence[CheckedRow], facts: dict[str, ImageFacts], groups: dict[str, Any]
) -> dict[str, Any]:
    """Statistics of the kept rows and their images."""
    sources: Counter[str] = Counter()
    answer_types: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    tokens = []
    used = {}
    references = 0
    for row in rows:
        if row.reason:
            continue
        sources[row.source] += 1
        answer_types[row.answer_type] += 1
        if row.found:
            findings[row.found] += 1
        tokens.append(row.tokens)
        references += len(row.images)
        for sha in row.images:
            used[sha] = facts[sha]

    images = list(used.values())
    formats = Counter(f"{p.format} {p.mode}" for p in images)
    widths = [p.width for p in images]
    heights = [p.height for p in images]
    longest_sides = list(map(max, widths, heights))
    return {
        "rows": {"read": len(rows), "kept": len(tokens)},
        "sources": dict(sources.most_common()),
        "answer_types": dict(answer_types.most_common()),
        "rejected_answers": _rejected(rows),
        "found": dict(findings.most_common()),
        "tokens": {
            "percentiles": percentiles(tokens),
            "histogram": histogram(tokens, (128, 256, 512, 1024, 2048, 4096, 8192)),
        },
        "images": {
            "distinct": len(images),
            "references": references,
            "formats": dict(formats.most_common()),
            "with_more_frames": sum(image.frames > 1 for image in images),
            "width": percentiles(widths),
            "height": percentiles(heights),
            "longest_side": histogram(longest_sides, (56, 112, 224, 448, 896, 1792, 3584)),
        },
        "groups": groups,
    }


def tables(manifest: Manifest) -> list[tuple[str, dict[str, int]]]:
    """(Title, counts) of all that a manifest tells of its dataset; none that is empty."""
    stats = manifest.statistics
    titled = [("rows", manifest.rows), ("left out, by reason", manifest.quarantined)]
    if stats:
        images, tokens = stats["images"], stats["tokens"]
        image_counts = {name: count for name, count in images.items() if isinstance(count, int)}
        image_counts["refused"] = len(images["refused"])
        tokens_of = "tokens" if manifest.settings.get("tokenizer") else "image tokens (no tokenizer given)"
        near = "rows whose image the training split nearly has, or whose text question"
        titled += [
            ("sources", stats["sources"]),
            ("answer types", stats["answer_types"]),
            (f"{tokens_of} of the prompt", tokens["histogram"]),
            (f"{tokens_of}, percentiles", tokens["percentiles"]),
            ("longest side of the images, pixels", images["longest_side"]),
            ("image formats", images["formats"]),
            ("images", image_counts),
            (near, stats["groups"]["rows_near_train"]),
        ]
        for overlap in stats["overlaps"]:
            titled.append(
                (f"rows of {overlap['set']} with an image of ours", overlap["evaluation_rows_touched"])
            )
    return [(title, counts) for title, counts in titled if counts]
