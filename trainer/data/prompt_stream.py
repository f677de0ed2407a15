"""Selects the prompts of each step, a pure function of (seed, step): the step is the position in the data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import Prompt
from trainer.config import ConfigError


class PromptStream:
    """The rows, shuffled anew every epoch, in batches that continue across epochs."""

    def __init__(self, rows: Sequence[int], per_step: int, seed: int) -> None:
        """`rows` are the dataset indices that may be trained on. Raises ConfigError if they are too few for
        one step."""
        self.rows = tuple(rows)
        self.size = per_step
        self.seed = seed
        if len(self.rows) < per_step:
            raise ConfigError(
                f"{len(self.rows)} usable rows are too few for steps of {per_step}: "
                "lower rollout.prompts_per_step (or sft.batch_size), "
                "or raise data.prompt_max_tokens (or sft.max_tokens) if most rows are too long"
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(self.rows)
        random.Random(seed_of(self.seed, "epoch", epoch)).shuffle(order)
        return order

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of step `step`, counted from 1, where every step takes `size` of them."""
        return self.draw((step - 1) * self.size, self.size, step)

    def draw(self, start: int, count: int, step: int, group: int = 0) -> list[Prompt]:
        """`count` prompts of step `step`, after the first `start` of the run. Their groups count from
        `group`."""
        prompts = []
        for i in range(count):
            epoch, offset = divmod(start + i, len(self.rows))
            row = self._order(epoch)[offset]
            seed = seed_of(self.seed, "sample", step, row, epoch)
            prompts.append(Prompt(group=group + i, row=row, seed=seed))
        return prompts
