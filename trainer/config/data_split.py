"""Which rows of which dataset a call is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """One split of a prepared dataset, or its first rows. Row indices everywhere count within the split."""

    path: str
    """Folder or object-store URL of the prepared dataset."""
    name: str
    """Name of the split, such as `train`."""
    max_rows: int = 0
    """Only this many first rows are used; 0 means all."""

    def __str__(self) -> str:
        return f"split {self.name} of {self.path}"
