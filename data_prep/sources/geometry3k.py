"""Geometry3K as `hiyouga/geometry3k` publishes it: free-form answers, one image per problem, three splits."""

from __future__ import annotations

from typing import Any

from data_prep.ingest.hub import Progress, Repository
from data_prep.sources.parquet_source import ParquetSource, fetch_splits
from data_prep.sources.source import Candidate, Problem, unboxed, with_images

REPO = "hiyouga/geometry3k"
FILES = {
    "train": ["data/train-*.parquet"],
    "validation": ["data/validation-*.parquet"],
    "test": ["data/test-*.parquet"],
}


class Geometry3K(ParquetSource):
    """Columns `images` (a list), `problem` (with `<image>` where an image belongs), `answer`."""

    def parse(self, index: int, split: str, record: dict[str, Any], images: list[str]) -> Candidate | Problem:
        """Puts placeholders where the problem has `<image>`, or all images first if it has none."""
        content = with_images(record["problem"], len(images))
        messages = [{"role": "user", "content": content}]
        return Candidate(index, self.name, messages, images, unboxed(record["answer"]), "", split)


def sources(repository: Repository, on_progress: Progress) -> list[Geometry3K]:
    """All three splits."""
    tables, records = fetch_splits(repository, FILES, on_progress)
    return [Geometry3K("geometry3k", tables, repository.revision, records, image_column="images")]
