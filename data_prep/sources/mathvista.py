"""MathVista testmini, for evaluation: 1,000 questions with an image, from many source sets.

The prompt is the published `query` (hint, question, choices as `(A) …`). A multiple-choice answer becomes its letter.
The official score uses a language model to extract answers; ours asks for a box: compare scores within one harness.
"""

from __future__ import annotations

from typing import Any

from data_prep.ingest.hub import Progress, Repository
from data_prep.sources.parquet_source import ParquetSource, fetch_splits
from data_prep.sources.source import Candidate, Problem, with_images

REPO = "AI4Math/MathVista"
FILES = {"test": ["data/testmini-*.parquet"]}


class MathVista(ParquetSource):
    """Columns `query`, `choices`, `answer`, `question_type`, `metadata.source`, `decoded_image` and others."""

    def parse(self, index: int, split: str, record: dict[str, Any], images: list[str]) -> Candidate | Problem:
        """The source set goes into `source`: `mathvista/IconQA`."""
        answer = str(record["answer"] or "").strip()
        if record.get("question_type") == "multi_choice":
            choices = [str(choice).strip() for choice in record["choices"] or []]
            if choices.count(answer) != 1:
                return Problem(index, "bad_choices", f"answer {answer!r} is not one of the choices", str(record)[:2000])
            answer = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[choices.index(answer)]
        content = with_images(record["query"], len(images))
        source = (record.get("metadata") or {}).get("source")
        messages = [{"role": "user", "content": content}]
        return Candidate(index, f"{self.name}/{source}" if source else self.name, messages, images, answer, "", split)


def sources(repository: Repository, on_progress: Progress) -> list[MathVista]:
    """testmini as the split `test`: the answers of MathVista's own test set are not public."""
    tables, records = fetch_splits(repository, FILES, on_progress)
    return [MathVista("mathvista", tables, repository.revision, records, image_column="decoded_image")]
