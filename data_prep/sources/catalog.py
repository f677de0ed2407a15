"""The datasets by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from data_prep.ingest.hub import Progress, Repository
from data_prep.sources import geometry3k, gsm8k, hendrycks_math, mathv60k, mathvista
from data_prep.sources.source import Source


@dataclass(frozen=True)
class Entry:
    """One dataset of the hub."""

    repo: str
    about: str
    sources: Callable[[Repository, Progress], Sequence[Source]]


CATALOG = {
    "mathv60k": Entry(mathv60k.REPO, "visual math, 65,118 rows, 2.4 GB", partial(mathv60k.sources, name="mathv60k")),
    "mathv-geo": Entry(mathv60k.REPO, "its geometry part alone, 56 MB", partial(mathv60k.sources, name="mathv-geo")),
    "geometry3k": Entry(geometry3k.REPO, "geometry with diagrams, 3,002 rows, free-form answers", geometry3k.sources),
    "gsm8k": Entry(gsm8k.REPO, "word problems, 8,792 rows, text only", gsm8k.sources),
    "math": Entry(hendrycks_math.REPO, "competition problems, 12,500 rows, text only", hendrycks_math.sources),
    "mathvista": Entry(mathvista.REPO, "evaluation: testmini, 1,000 rows", mathvista.sources),
}
