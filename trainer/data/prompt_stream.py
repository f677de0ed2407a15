"""Selects the prompts of each step, a pure function of (seed, step, level): the step is the position in the
data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import Prompt
from trainer.config import ConfigError


class PromptStream:
    """The rows, shuffled anew every epoch, in batches that continue across epochs."""

    def __init__(
        self, rows: Sequence[int], per_step: int, seed: int, difficulty: Mapping[int, int] | None = None
    ) -> None:
        """`rows` are the dataset indices that may be trained on.

        difficulty: of rows that are drawn at one level only, by index; the others are drawn at every level.
        Raises ConfigError if the rows of all levels, or of one, are too few for one step.
        """
        self.rows = tuple(rows)
        self.size = per_step
        self.seed = seed
        difficulty = difficulty or {}
        self.levels = sorted({difficulty[row] for row in rows if row in difficulty})
        self._check_enough(self.rows, "")
        self._at: list[tuple[int, ...]] = []
        for level in self.levels:
            drawn = []
            for row in rows:
                # A row without a level is drawn at every one.
                if difficulty.get(row, level) == level:
                    drawn.append(row)
            self._check_enough(drawn, f" of difficulty {level}")
            self._at.append(tuple(drawn))
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _check_enough(self, rows: Sequence[int], which: str) -> None:
        if len(rows) < self.size:
            raise ConfigError(
                f"{len(rows)} usable rows{which} are too few for steps of {self.size}: "
                "lower rollout.prompts_per_step (or sft.batch_size), "
                "or raise data.prompt_max_tokens (or sft.max_tokens) if most rows are too long"
            )

    def _drawn(self, level: int) -> tuple[int, ...]:
        return self._at[level] if self.levels else self.rows

    def _shuffled(self, epoch: int, level: int) -> list[int]:
        order = list(self._drawn(level))
        random.Random(seed_of(self.seed, "epoch", epoch)).shuffle(order)
        return order

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of step `step`, counted from 1, where every step takes `size` of them."""
        return self.draw((step - 1) * self.size, self.size, step)

    def draw(self, start: int, count: int, step: int, group: int = 0, level: int = 0) -> list[Prompt]:
        """`count` prompts of step `step`, after the first `start` of the run.

        Their groups count from `group`. level: number in `levels` of the one that is drawn from.
        """
        prompts = []
        for i in range(count):
            epoch, offset = divmod(start + i, len(self._drawn(level)))
            row = self._order(epoch, level)[offset]
            seed = seed_of(self.seed, "sample", step, row, epoch)
            prompts.append(Prompt(group=group + i, row=row, seed=seed))
        return prompts
