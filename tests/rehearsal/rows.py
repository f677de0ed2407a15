"""Rows of a recipe's passes: longest samples with largest images, or usual ones up to the budget."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.plan.activations import later_images
from recipes.recipe.spec import Recipe
from tests.rehearsal.models import IMAGE
from trainer.algorithm import batching
from trainer.algorithm.traces import Trace, completed_trace
from trainer.config import RunConfig
from trainer.config.budget import longest_sample
from trainer.data.processor import EncodedPrompt, mrope_positions
from trainer.hardware.model_shapes import Shape, Vision
from trainer.learning.policy import TrainMicroBatch

SMALL = (15, 20)
"""Rows and columns of merged patches of a usual image: 300 tokens."""
ROWS = 32
"""Rows of merged patches of the largest image."""
WORDS = 20
"""Tokens of text before an image, and in the shortest prompt."""
SPREAD = 0.6
"""Standard deviation of a completion length's logarithm, as the plan draws them."""


SHORTEST = 40
"""Tokens of a sample that is worth adding."""


class Row:
    """Samples that become one row."""

    def __init__(self, vision: Vision | None) -> None:
        self.vision = vision
        self.rng = random.Random(0)
        self.encoded: list[EncodedPrompt] = []
        self.traces: list[Trace] = []

    def add(self, prompt_tokens: int, images: Sequence[tuple[int, int]], lengths: list[int]) -> None:
        """Adds a prompt, with images of so many merged patches where the model reads some, and its
        completions."""
        number = len(self.encoded)
        ids = self._words(WORDS)
        pixels = grid = None
        if images and (v := self.vision):
            grids = []
            for rows, columns in images:
                ids += self._words(1 if grids else 0) + [IMAGE] * (rows * columns)
                grids.append([1, v.merge * rows, v.merge * columns])
            grid = torch.tensor(grids)
            pixels = torch.zeros(int(grid.prod(-1).sum()), v.channels * v.temporal * v.patch**2)
        ids += self._words(prompt_tokens - len(ids))
        for index, length in enumerate(lengths):
            self.traces.append(
                completed_trace(ids, self._words(length), group=number, row=number, index=index)
            )
        self.encoded.append(EncodedPrompt(ids, pixels, grid))

    def fill(self, tokens: int) -> None:
        """Adds a sample without an image where there is room for one, so that the row has so many tokens."""
        left = tokens - sum(len(one.token_ids) for one in self.encoded) - sum(self.completions)
        if left > SHORTEST:
            self.add(WORDS, (), [left - WORDS])

    def _words(self, count: int) -> list[int]:
        """Token ids of text."""
        return [self.rng.randrange(1000) for _ in range(count)]

    def length(self, mean: float, most: int) -> int:
        """Tokens of a usual completion."""
        drawn = self.rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return max(1, int(min(most, drawn)))

    def micro_batch(self) -> batching.MicroBatch:
        """The row as the trainer packs it."""

        def positions(ids: list[int], grid: Tensor | None) -> Tensor:
            grids = () if grid is None else tuple(map(tuple, grid.tolist()))
            return mrope_positions(tuple(ids), grids, IMAGE, 2)

        return batching.collate(self.traces, lambda trace: self.encoded[trace.row], positions)

    @property
    def completions(self) -> list[int]:
        """Tokens of each completion."""
        return [len(trace.completion) for trace in self.traces]


def largest(recipe: Recipe, vision: Vision) -> tuple[int, int]:
    """Rows and columns of merged patches of the largest image that stands in a prompt beside a few words."""
    config = recipe.config
    room = longest_sample(config) if config.method == "sft" else config.data.prompt_max_tokens
    tokens = min(config.model.max_pixels // (vision.patch * vision.merge) ** 2, room - WORDS)
    return ROWS, tokens // ROWS


def longest(recipe: Recipe, shape: Shape, tokens: int) -> Row:
    """As many of the longest samples as a pass of so many tokens holds, each with the largest image, and one
    sample more up to that length."""
    config, vision = recipe.config, shape.vision
    made = Row(vision)
    images = [largest(recipe, vision)] if vision else []
    sample = longest_sample(config)
    prompt = config.data.prompt_max_tokens
    if config.method == "sft":  # all that may be is learned
        prompt = sum(rows * columns for rows, columns in images) + WORDS
    elif vision:  # where later images stand makes no difference to a pass
        later = later_images(config, vision) // vision.merge**2
        prompt += later
        images += [(ROWS, later // ROWS)] if later else []
    for _ in range(max(1, tokens // sample)):
        made.add(prompt, images, [sample - prompt])
    made.fill(tokens)
    return made


def usual(recipe: Recipe, shape: Shape, tokens: int) -> Row:
    """Groups of the dataset's lengths, with small images, up to so many tokens."""
    config, facts = recipe.config, recipe.dataset
    made = Row(shape.vision)
    samples = 1 if config.method == "sft" else config.rollout.samples_per_prompt
    most = longest_sample(config) - facts.prompt_tokens
    used = 0
    while True:
        lengths = [made.length(facts.answer_tokens, most) for _ in range(samples)]
        used += facts.prompt_tokens + sum(lengths)
        if used > tokens and made.traces:
            made.fill(tokens)
            return made
        made.add(facts.prompt_tokens, [SMALL], lengths)


def to_learn(config: RunConfig, batch: batching.MicroBatch, lengths: list[int]) -> TrainMicroBatch:
    """A row with all that its loss may need. lengths: tokens of its completions."""
    grpo = config.method == "grpo"
    judged = grpo and config.algorithm.kl_coef
    some = torch.zeros(batch.targets.numel())
    return TrainMicroBatch(
        batch=batch,
        advantages=some.clone(),
        weights=some.clone(),
        shares=some.clone(),
        lengths=torch.tensor(lengths),
        rollout_logprobs=some.clone() if grpo else None,
        old_logprobs=some.clone() if grpo else None,
        ref_logprobs=some.clone() if judged else None,
    )
