"""Task families of reasoning-gym as a source: `reasoning-gym:chain_sum=2,countdown`.

Every row follows from the seed and its index, and any prefix stays the same. A row keeps the entry that its
family made, by which the family grades answers (trainer/rewards/task_families.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from data_prep.ingest.archive import Member, Refused
from data_prep.ingest.wanted import Wanted
from data_prep.sources.row_source import BadRow, Candidate
from trainer.config import ConfigError
from trainer.config.overrides import unknown_key
from trainer.data.schema import DIFFICULTY, TASK
from trainer.rewards import task_families

NAME = "reasoning-gym"
PREFIX = f"{NAME}:"
VERSION = 1
"""Version of how rows are drawn: rows of the same seed differ between versions."""
BLOCK = 20_000
"""Number of indices that share one seed of the families, some of which take none above this number."""
MAX_REPEATS = 1_000
"""Repeated questions in a row after which there are no new ones."""


def weights_of(text: str) -> dict[str, float]:
    """Weight of each family of `reasoning-gym:NAME[=WEIGHT],...`. Raises ConfigError."""
    weights: dict[str, float] = {}
    for part in text.removeprefix(PREFIX).split(","):
        name, _, weight = part.strip().partition("=")
        try:
            value = float(weight or 1)
        except ValueError:
            value = 0.0
        if not name or name in weights or not 0 < value < 1000:
            raise ConfigError(
                f"{text}: write {PREFIX}FAMILY,FAMILY=WEIGHT, each family once, a weight above 0 and below"
                " 1000"
            )
        weights[name] = value
    return weights


@dataclass
class Families:
    """`rows_wanted` different questions, each family as often as its weight says; a share for validation."""

    weights: dict[str, float]
    rows_wanted: int
    seed: int = 0
    difficulty: tuple[int, int] = (1, 5)
    validation: float = 0.02
    evaluation: bool = False
    """Whether all rows are of the split `test`; no training set with the same share has them."""
    name: str = NAME
    revision: str = ""
    weight: float = 1.0
    notes: Counter[str] = field(default_factory=Counter)
    _made: dict[tuple[str, int, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [name for name in self._package.DATASETS if name != "composite"]
        for name in self.weights:
            if name not in known:
                raise ConfigError(unknown_key(f"{PREFIX}{name}", name, known))

    @cached_property
    def _package(self) -> Any:
        return task_families.load_families(task_families.family_packages())

    @property
    def files(self) -> list[dict[str, Any]]:
        """No file is read. The options stand for one, with the lock of the package."""
        low, high = self.difficulty
        asked = ",".join(f"{name}={weight:g}" for name, weight in self.weights.items())
        lock = hashlib.sha256(task_families.REQUIREMENTS.read_bytes()).hexdigest()[:8]
        held = ", held out" if self.evaluation else ""
        recipe = (
            f"{PREFIX}{asked} v{VERSION}: rows {self.rows_wanted}, seed {self.seed}, "
            f"difficulty {low}..{high}, validation {self.validation:g}{held}, packages {lock}"
        )
        return [{"path": recipe, "bytes": 0, "sha256": hashlib.sha256(recipe.encode()).hexdigest()}]

    def has_levels(self, family: str) -> bool:
        """Whether the package says what makes this family harder."""
        return family in self._package.CURRICULA

    def entry(self, family: str, level: int, index: int) -> dict[str, Any] | None:
        """What the family makes for an index at a level, as JSON reads it; None where it finds no problem."""
        block, offset = divmod(index, BLOCK)
        key = family, level, block
        if key not in self._made:
            self._made[key] = self._at_level(*key)
        try:
            made = self._made[key][offset]
        except ValueError:  # countdown gives up after 100 drawn expressions
            return None
        return json.loads(json.dumps(made))

    def _at_level(self, family: str, level: int, block: int) -> Any:
        """The family up to a level, as the package means it: ranges begin where they begin at the first.

        An attribute with fewer levels keeps its last. Raises ConfigError where the family refuses its own
        level.
        """
        made_by, configured_by = self._package.DATASETS[family]
        fixed = {"seed": (self.seed + 1_000_003 * block) % 2**32, "size": BLOCK}
        if not self.has_levels(family):
            return made_by(configured_by(**fixed))
        curriculum = self._package.CURRICULA[family]()
        curriculum.set_global_level(level - 1)
        try:
            return made_by(curriculum.generate_configuration(fixed))
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"{PREFIX}{family} has no difficulty {level} ({error}): choose others"
            ) from None

    def rows(self) -> Iterator[Candidate | BadRow]:
        """All rows. The family is the sub-source; a question that was drawn before is skipped."""
        names, weights = list(self.weights), list(self.weights.values())
        seen: set[bytes] = set()
        index = new_at = 0
        patience = MAX_REPEATS / (self.validation or 1) if self.evaluation else MAX_REPEATS
        while len(seen) < self.rows_wanted:
            if index - new_at > patience:
                raise ConfigError(
                    f"no more than {len(seen):,} different rows: ask for fewer, or more families or levels"
                )
            rng = random.Random(f"{VERSION}/{self.seed}/{index}")
            (family,) = rng.choices(names, weights)
            level = rng.randint(*self.difficulty)
            entry = self.entry(family, level, index)
            if entry is not None and (split := self._split_of(entry["question"], seen)):
                new_at = index
                yield self._row(index, family, level, entry, split)
            index += 1

    def _split_of(self, question: str, seen: set[bytes]) -> str:
        """The split of a new question, by its text alone; empty for one that is not wanted."""
        key = hashlib.sha256(question.encode()).digest()[:16]
        held_out = int.from_bytes(key[:4], "big") < self.validation * 2**32
        if key in seen or self.evaluation and not held_out:
            return ""
        seen.add(key)
        if self.evaluation:
            return "test"
        return "validation" if held_out else "train"

    def _row(self, index: int, family: str, level: int, entry: dict[str, Any], split: str) -> Candidate:
        extra: dict[str, Any] = {TASK: {"family": family, "entry": entry}}
        if self.has_levels(family):
            extra[DIFFICULTY] = level
        return Candidate(
            index=index,
            source=f"{self.name}/{family}",
            messages=[{"role": "user", "content": entry["question"]}],
            images=[],
            answer=entry["answer"] or "",
            split=split,
            extra=extra,
        )

    def members(self, refused: Refused, wanted: Wanted) -> Iterator[Member]:
        """No images."""
        return iter(())

    def image_bytes(self) -> int:
        """No images."""
        return 0
