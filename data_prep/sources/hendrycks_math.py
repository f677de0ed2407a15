"""MATH (Hendrycks et al., 2021): competition problems, text only. The answer is the last box of the solution."""

from __future__ import annotations

import re
from typing import Any

from data_prep.ingest.hub import Progress, Repository
from data_prep.sources.parquet_source import ParquetSource, fetch_splits
from data_prep.sources.source import Candidate, Problem, unboxed, worked

REPO = "EleutherAI/hendrycks_math"
"""The original repository was withdrawn; this copy has one folder per subject."""
FILES = {"train": ["*/train-*.parquet"], "test": ["*/test-*.parquet"]}


class Math(ParquetSource):
    """Columns `problem`, `level`, `type` (the subject), `solution`."""

    def parse(self, index: int, split: str, record: dict[str, Any], images: list[str]) -> Candidate | Problem:
        """Takes the last box as gold."""
        gold = boxed(record["solution"])
        if gold is None:
            return Problem(index, "no_answer_field", "no box in the solution", str(record)[:2000])
        messages = [{"role": "user", "content": record["problem"].strip()}]
        source = f"{self.name}/{record['type']}" if record.get("type") else self.name
        return Candidate(index, source, messages, images, gold, worked(record["solution"].strip(), gold), split)


def boxed(solution: str) -> str | None:
    """Content of the last `\\boxed{…}`, `\\fbox{…}` or `\\boxed 5`; None if there is none."""
    text = solution.replace("\\fbox{", "\\boxed{")
    if "\\boxed{" in text:
        return unboxed(text)
    bare = re.findall(r"\\boxed\s+([^\s$.,]+)", text)
    return bare[-1] if bare else None


def sources(repository: Repository, on_progress: Progress) -> list[Math]:
    """Train and test of all subjects."""
    tables, records = fetch_splits(repository, FILES, on_progress)
    return [Math("math", tables, repository.revision, records)]
