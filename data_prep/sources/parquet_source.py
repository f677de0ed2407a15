"""Datasets that the hub holds as Parquet files, with the images inside."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_prep.ingest.archive import Member, Refused
from data_prep.ingest.hub import Fetched, Progress, Repository
from data_prep.sources.source import Candidate, Problem

BATCH_ROWS = 64


@dataclass
class ParquetSource:
    """Rows of several Parquet files, one after the other. A subclass parses a record.

    An image is named `ROW-K`: the K-th of the row with this index over all files.
    """

    name: str
    tables: list[tuple[Path, str]]
    """(file, split of its rows)."""
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    image_column: str = ""
    """Column of an image or of a list of them, each a struct of `bytes` and `path`; empty: none."""

    @abstractmethod
    def parse(self, index: int, split: str, record: dict[str, Any], images: list[str]) -> Candidate | Problem:
        """One record, without the bytes of its images."""

    def rows(self) -> Iterator[Candidate | Problem]:
        """Reads every column but the images' bytes."""
        index = 0
        for path, split in self.tables:
            table = pq.ParquetFile(path)
            for batch in table.iter_batches(BATCH_ROWS, columns=_light_columns(table)):
                for record in batch.to_pylist():
                    count = len(_listed(record.get(self.image_column))) if self.image_column else 0
                    images = [f"{index}-{k}" for k in range(count)]
                    try:
                        yield self.parse(index, split, record, images)
                    except (KeyError, TypeError, ValueError, AttributeError) as error:
                        yield Problem(index, "bad_record", f"{type(error).__name__}: {error}", str(record)[:2000])
                    index += 1

    def members(self, refused: Refused) -> Iterator[Member]:
        """Reads the images' bytes only."""
        index = 0
        for path, _ in self.tables if self.image_column else []:
            for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=[self.image_column]):
                for value in batch.column(0).to_pylist():
                    for k, image in enumerate(_listed(value)):
                        if image and image.get("bytes"):
                            yield Member(f"{index}-{k}", image["bytes"])
                    index += 1

    def image_bytes(self) -> int:
        """The files' own size: images do not compress."""
        return sum(path.stat().st_size for path, _ in self.tables) if self.image_column else 0


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _light_columns(table: pq.ParquetFile) -> list[str]:
    """All leaf columns except `…bytes`."""
    paths = [table.schema.column(i).path for i in range(len(table.schema))]
    return [path for path in paths if not path.endswith(".bytes")]


def fetch_splits(
    repository: Repository, patterns: dict[str, list[str]], on_progress: Progress
) -> tuple[list[tuple[Path, str]], list[dict[str, Any]]]:
    """Fetches the files of each split ({split: shell patterns}). Returns (file, split) pairs and manifest records."""
    tables: list[tuple[Path, str]] = []
    records: list[dict[str, Any]] = []
    for split, wanted in patterns.items():
        for pattern in wanted:
            fetched: list[Fetched] = repository.fetch(repository.matching(pattern), on_progress)
            tables += [(one.local, split) for one in fetched]
            records += [one.record for one in fetched]
    return tables, records
