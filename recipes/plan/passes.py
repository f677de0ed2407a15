"""A step's passes: typical lengths of the dataset, dealt to ranks by the trainer's scheduler, and what they
gather."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache

from recipes.plan import hub_config
from recipes.recipe.spec import DataFacts, Recipe
from trainer.algorithm.scheduling import PassCost, Plan, SampleLength, pass_times, schedule_passes
from trainer.config import RunConfig
from trainer.config.budget import (
    attended_cost,
    image_token_cost,
    keys_per_token,
    logprob_tokens,
    micro_batch_tokens,
)
from trainer.hardware.model_shapes import Shape

COMPLETIONS, PROMPTS = 0.6, 0.4
"""Standard deviation of the logarithm of lengths (planning figures); half of a completion's variance is its
group's."""
IMAGE_SHARE = 0.7
"""Share of a vision prompt's tokens that are its image's: 289 of MathV60K's 420 (planning figure)."""


@dataclass(frozen=True)
class Passes:
    """One typical step. A pass costs, in tokens' worth of the layers' matrix products, what its slowest rank
    does."""

    lengths: tuple[SampleLength, ...]
    """Lengths of all samples."""
    logprobs: tuple[float, ...]
    """Passes without gradients over all samples, for one model."""
    updates: tuple[float, ...]
    """Passes of all updates."""
    models: int
    """Whose log-probabilities are computed before the updates: the policy's if it moves within the step, the
    reference's."""
    teacher: tuple[float, ...] = ()
    """Passes of the teacher over all samples, in tokens' worth of its own products; () without one."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(x.completion_tokens for x in self.lengths)

    @cached_property
    def mean(self) -> float:
        """Tokens of a completion."""
        return sum(x.completion_tokens for x in self.lengths) / len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all samples, each with its prompt."""
        return sum(x.prompt_tokens + x.completion_tokens for x in self.lengths)

    @cached_property
    def context(self) -> float:
        """Cached tokens that decoding reads, over all completion tokens."""
        return sum(x.completion_tokens * (x.prompt_tokens + x.completion_tokens / 2) for x in self.lengths)

    @cached_property
    def image_tokens(self) -> int:
        """Tokens of all prompts' images; a prompt's samples share them."""
        return sum({x.prompt: x.image_tokens for x in self.lengths}.values())

    @cached_property
    def prompts(self) -> tuple[int, float]:
        """Tokens of all samples' prompts, and the context that they see: the mean prompt, weighted by its
        length."""
        total = sum(x.prompt_tokens for x in self.lengths)
        return total, sum(x.prompt_tokens**2 for x in self.lengths) / total


def of_step(recipe: Recipe, shape: Shape) -> Passes:
    """The passes of one step. Equal recipes give equal passes."""
    return _of_step(recipe.config, recipe.dataset, shape, hub_config.teacher_shape(recipe.config))


@lru_cache(maxsize=32)
def _of_step(config: RunConfig, dataset: DataFacts, shape: Shape, teacher: Shape | None) -> Passes:
    rng = random.Random(0)
    lengths = typical_lengths(config, dataset, rng, vision=shape.vision is not None)
    updates = list(map(max, update_times(config, shape, lengths, rng)))
    if config.method == "sft":
        return Passes(tuple(lengths), (), tuple(updates), 0)
    models = config.old_logprobs + bool(config.algorithm.kl_coef)
    logprobs: list[float] = []
    judged: list[float] = []
    if models:
        budget = logprob_tokens(config, shape)
        keys = keys_per_token(config, shape, budget, gradients=False)
        plan = schedule_passes(lengths, config.placement.world_size, budget, cost_of(shape), keys)
        logprobs = list(map(max, pass_times(plan, lengths, cost_of(shape))))
        if teacher:  # its passes are dealt as the policy's are
            judged = list(map(max, pass_times(plan, lengths, cost_of(teacher))))
    return Passes(tuple(lengths), tuple(logprobs), tuple(updates), models, tuple(judged))


def cost_of(shape: Shape) -> PassCost:
    """What a pass of this model costs, as the trainer's schedule counts it."""
    return PassCost(attended=attended_cost(shape), image_token=image_token_cost(shape))


def update_times(
    config: RunConfig, shape: Shape, lengths: list[SampleLength], rng: random.Random
) -> list[list[float]]:
    """Time of every rank in every pass of a step's updates, [pass][rank], in tokens' worth of the layers'
    matrix products."""
    epochs = 1 if config.method == "sft" else config.algorithm.epochs
    together = len(lengths) if config.method == "sft" else config.samples_per_update
    budget = micro_batch_tokens(config, shape)
    times: list[list[float]] = []
    for _ in range(epochs):
        order = lengths if together == len(lengths) else rng.sample(lengths, len(lengths))
        for start in range(0, len(order), together):
            part = order[start : start + together]
            plan: Plan = schedule_passes(
                part,
                config.placement.world_size,
                budget,
                cost_of(shape),
                keys_per_token(config, shape, budget),
            )
            times += pass_times(plan, part, cost_of(shape))
    return times


def typical_lengths(
    config: RunConfig, dataset: DataFacts, rng: random.Random, vision: bool, spread: float = COMPLETIONS
) -> list[SampleLength]:
    """Lengths of one step's samples: lognormal about the dataset's means, which the limits leave as they
    are. spread: standard deviation of the logarithm of a completion's length."""
    n = config.rollout.samples_per_prompt
    longest = config.rollout.max_tokens
    if config.method == "sft":
        n = 1
        longest = max(1, config.sft.max_tokens - dataset.prompt_tokens)
    prompts = []
    drawn = []
    for _ in range(config.rows_per_step):
        tokens = dataset.prompt_tokens * math.exp(rng.gauss(-(PROMPTS**2) / 2, PROMPTS))
        prompts.append(max(1, min(round(tokens), config.data.prompt_max_tokens)))
        group = rng.gauss()
        for _ in range(n):
            # Half of the variance is the group's, half is the completion's own.
            drawn.append(math.exp(spread * math.sqrt(0.5) * (group + rng.gauss())))
    mean = min(dataset.answer_tokens, 0.98 * longest)
    scale = mean
    for _ in range(12):  # what the limit cuts off is made up for by all
        scale *= mean / (sum(min(scale * x, longest) for x in drawn) / len(drawn))
    share = IMAGE_SHARE if vision else 0.0
    lengths = []
    for i, x in enumerate(drawn):
        prompt = prompts[i // n]
        completion = max(1, min(round(scale * x), longest))
        lengths.append(SampleLength(i // n, prompt, completion, round(share * prompt)))
    return lengths


def backward_gathers(config: RunConfig, shape: Shape) -> float:
    """How often the backward pass gathers the weights: once, since a block is computed again while it is
    whole, but for the last of the forward pass, which stay whole: half of `live_parameters`."""
    return max(0.0, 1 - config.optimizer.live_parameters / (2 * shape.parameters))


def count_blocks(shape: Shape) -> int:
    """Blocks of the model: its decoder's layers and its tower's."""
    return shape.layers + (shape.vision.depth if shape.vision else 0)
