"""Counts of a prepared dataset, for the summary and the preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from data_prep.checks.validate import CheckedRow
from data_prep.ingest.images import ImageFacts

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


def percentiles(values: Sequence[int]) -> dict[str, int]:
    """Nearest-rank percentiles, keyed by their number; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {str(p): ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}


def histogram(values: Sequence[int], edges: Sequence[int]) -> dict[str, int]:
    """Counts of values below each edge and from the last one on, keyed `<edge` and `>=edge`."""
    counts = {f"<{edge}": 0 for edge in edges} | {f">={edges[-1]}": 0}
    for value in values:
        label = next((f"<{edge}" for edge in edges if value < edge), f">={edges[-1]}")
        counts[label] += 1
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
    kept = [row for row in rows if not row.reason]
    used = {sha: facts[sha] for row in kept for sha in row.images}
    images = list(used.values())
    tokens = [row.tokens for row in kept]
    sources = Counter(row.source for row in kept)
    answer_types = Counter(row.answer_type for row in kept)
    findings = Counter(row.found for row in kept if row.found)
    formats = Counter(f"{p.format} {p.mode}" for p in images)
    longest_sides = [max(p.width, p.height) for p in images]
    references = sum(len(row.images) for row in kept)
    return {
        "rows": {"read": len(rows), "kept": len(kept)},
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
            "width": percentiles([p.width for p in images]),
            "height": percentiles([p.height for p in images]),
            "longest_side": histogram(longest_sides, (56, 112, 224, 448, 896, 1792, 3584)),
        },
        "groups": groups,
    }
