"""GSM8K: grade-school word problems, text only. The answer stands after `####`."""

from __future__ import annotations

import re
from typing import Any

from data_prep.ingest.hub import Progress, Repository
from data_prep.sources.parquet_source import ParquetSource, fetch_splits
from data_prep.sources.source import Candidate, Problem, worked

REPO = "openai/gsm8k"
FILES = {"train": ["main/train-*.parquet"], "test": ["main/test-*.parquet"]}


class GSM8K(ParquetSource):
    """Columns `question` and `answer`: the reasoning with calculator marks `<<6*7=42>>`, `####`, the number."""

    def parse(self, index: int, split: str, record: dict[str, Any], images: list[str]) -> Candidate | Problem:
        """The number without thousands separators; the reasoning without calculator marks."""
        reasoning, mark, answer = record["answer"].rpartition("####")
        if not mark:
            return Problem(index, "no_answer_field", "no #### in the answer", str(record)[:2000])
        gold = answer.strip().replace(",", "")
        reasoning = re.sub(r"<<[^>]*>>", "", reasoning).strip()
        messages = [{"role": "user", "content": record["question"].strip()}]
        return Candidate(index, self.name, messages, images, gold, worked(reasoning, gold), split)


def sources(repository: Repository, on_progress: Progress) -> list[GSM8K]:
    """Train and test, as published."""
    tables, records = fetch_splits(repository, FILES, on_progress)
    return [GSM8K("gsm8k", tables, repository.revision, records)]
