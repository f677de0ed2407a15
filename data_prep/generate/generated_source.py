"""Generated problems as a source.

Every row follows from the seed and its index, and any prefix stays the same.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import PIL

from data_prep.generate import counting, details, geometry
from data_prep.generate.scene import Problem
from data_prep.ingest.archive import Member, Refused
from data_prep.ingest.wanted import Wanted
from data_prep.sources.row_source import BadRow, Candidate
from trainer.config import ConfigError
from trainer.data.schema import DIFFICULTY

FAMILIES: dict[str, Callable[[random.Random, int], Problem]] = {
    "geometry": geometry.make,
    "counting": counting.make,
}
"""Families that take turns unless others are asked for."""
LARGE: dict[str, Callable[[random.Random, int], Problem]] = {"details": details.make}
"""Families whose pictures are large; drawn where they are asked for."""
VERSION = 2
"""Version of the families: rows of the same seed differ between versions."""
MAX_REPEATS = 10_000
"""Repeated problems in a row after which there are no new ones."""
PNG_BYTES = 20_000
"""Estimated size of an image."""


def problem(
    seed: int, index: int, difficulty: tuple[int, int] = (1, 5), families: tuple[str, ...] = tuple(FAMILIES)
) -> Problem:
    """The problem with this index: families take turns, all else is drawn from the seed."""
    rng = random.Random(f"{VERSION}/{seed}/{index}")
    make = (FAMILIES | LARGE)[families[index % len(families)]]
    return make(rng, rng.randint(*difficulty))


def level(seed: int, index: int, difficulty: tuple[int, int]) -> int:
    """The difficulty that the problem with this index has."""
    return random.Random(f"{VERSION}/{seed}/{index}").randint(*difficulty)


def held_out(drawn: Problem, share: float) -> bool:
    """Whether a problem is for validation: by its content alone, so that no seed has it for training."""
    return int(drawn.key[:8], 16) < share * 2**32


@dataclass
class Generated:
    """`rows` different problems, a share of them for validation."""

    rows_wanted: int
    seed: int = 0
    difficulty: tuple[int, int] = (1, 5)
    validation: float = 0.02
    evaluation: bool = False
    """Whether all rows are of the split `test`; no training set with the same share has them."""
    families: tuple[str, ...] = tuple(FAMILIES)
    """Kinds of problems that take turns."""
    name: str = "generated"
    revision: str = ""
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def files(self) -> list[dict[str, Any]]:
        """No file is read. The options stand for one, with the version of Pillow, which draws the letters."""
        low, high = self.difficulty
        held = ", held out" if self.evaluation else ""
        if self.families != tuple(FAMILIES):
            held += f", families {' '.join(self.families)}"
        recipe = (
            f"generated v{VERSION}: rows {self.rows_wanted}, seed {self.seed}, difficulty {low}..{high}, "
            f"validation {self.validation:g}{held}, Pillow {PIL.__version__}"
        )
        return [{"path": recipe, "bytes": 0, "sha256": hashlib.sha256(recipe.encode()).hexdigest()}]

    def problems(self) -> Iterator[tuple[int, str, Problem]]:
        """(index, family, problem) of every row; a repeated question with the same image is skipped."""
        seen: set[bytes] = set()
        index = repeats = 0
        while len(seen) < self.rows_wanted:
            drawn = problem(self.seed, index, self.difficulty, self.families)
            key = hashlib.sha256(f"{drawn.question}{drawn.scene.digest}".encode()).digest()[:16]
            if key not in seen and (not self.evaluation or held_out(drawn, self.validation)):
                seen.add(key)
                repeats = 0
                yield index, self.families[index % len(self.families)], drawn
            else:
                repeats += 1
            if repeats > MAX_REPEATS:
                raise ConfigError(
                    f"no more than {len(seen):,} different rows: ask for fewer, or more difficulties"
                )
            index += 1

    def rows(self) -> Iterator[Candidate | BadRow]:
        """All rows. The family is the sub-source; it, kind and difficulty are in `extra`."""
        for index, family, drawn in self.problems():
            split = "validation" if held_out(drawn, self.validation) else "train"
            if self.evaluation:
                split = "test"
            yield Candidate(
                index=index,
                source=f"{self.name}/{family}",
                messages=[{"role": "user", "content": [{"type": "image"}, _text(drawn.question)]}],
                images=[f"{index}.png"],
                answer=drawn.answer,
                split=split,
                extra={
                    "family": family,
                    "kind": drawn.kind,
                    DIFFICULTY: level(self.seed, index, self.difficulty),
                },
            )

    def members(self, refused: Refused, wanted: Wanted) -> Iterator[Member]:
        """The images, drawn one at a time."""
        for index, _, drawn in self.problems():
            name = f"{index}.png"
            if name in wanted.paths:
                yield Member(name, PNG_BYTES, drawn.scene.png)

    def image_bytes(self) -> int:
        """About how many bytes all images have."""
        return self.rows_wanted * PNG_BYTES


def _text(question: str) -> dict[str, str]:
    return {"type": "text", "text": question.strip()}
