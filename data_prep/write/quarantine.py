"""Rows that are left out of a prepared dataset, each with the reason."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TextIO

from data_prep.sources.row_source import BadRow, Candidate
from trainer.data.schema import question_text


class Quarantine:
    """The file of the rows that are left out, a JSON object in each line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.counts: Counter[str] = Counter()
        """Number of rows by the kind of their reason."""

    def add_unreadable(self, row: BadRow, source: str) -> None:
        """Adds a record that could not be read as a row."""
        self._add(f"{row.reason}: {row.detail}", source=source, index=row.index, raw=row.raw)

    def add_rejected(self, row: Candidate, reason: str) -> None:
        """Adds a row that a check has rejected."""
        self._add(
            reason,
            source=row.source,
            index=row.index,
            question=question_text(row.messages)[:2000],
            answer=row.answer,
            images=row.images,
        )

    def _add(self, reason: str, **row: Any) -> None:
        kind, _, detail = reason.partition(": ")
        self.counts[kind] += 1
        record = {"reason": kind, "detail": detail, **row}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
