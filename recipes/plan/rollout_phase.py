"""What engines do between two updates: all completions of a step, or a piece of those of several steps.

With `rollout.tokens_per_step` L and `rollout.staleness` k, a completion grows by L tokens in each of its
first k phases, and to its end in the next. So a phase has a step's tokens whatever L is, in more and shorter
pieces. The prompt of one that goes on is read again with the tokens so far: new weights have emptied the
caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipes.plan import image_cost
from recipes.plan.passes import Passes
from trainer.config import RunConfig
from trainer.hardware.model_shapes import Shape


@dataclass(frozen=True)
class RolloutPhase:
    """The pieces of completions that one phase samples, in a run that is under way."""

    sequences: int
    """Number of pieces."""
    longest: int
    """Tokens of the longest piece."""
    mean: float
    """Tokens of a piece."""
    cached: int
    """Tokens in the caches at the ends of all pieces: prompts, tokens so far, and the pieces."""


def of_step(step: Passes, config: RunConfig) -> RolloutPhase:
    """The phase of a run all of whose steps have the same lengths."""
    limit = config.rollout.tokens_per_step
    if not limit:
        return RolloutPhase(len(step.lengths), step.longest, step.mean, step.tokens)
    pieces = []
    cached = 0
    for length in step.lengths:
        done = 0
        for phases_left in range(config.rollout.staleness, -1, -1):
            left = length.completion_tokens - done
            piece = min(left, limit) if phases_left else left
            done += piece
            pieces.append(piece)
            cached += length.prompt_tokens + done
            if done == length.completion_tokens:
                break
    return RolloutPhase(len(pieces), max(pieces), sum(pieces) / len(pieces), cached)


def prefill_flops(shape: Shape, step: Passes, config: RunConfig) -> float:
    """FLOPs of a phase's prompts and images, and of the completions so far that go on."""
    flops = _prompts(shape, step, config)
    limit = config.rollout.tokens_per_step
    for phase in range(1, config.rollout.staleness + 1) if limit else ():
        so_far = phase * limit
        going_on = tuple(length for length in step.lengths if length.completion_tokens > so_far)
        if not going_on:
            break
        by_prompt = {length.prompt: length for length in going_on}
        read = tuple(by_prompt.values()) if config.rollout.prefix_caching else going_on
        flops += image_cost.tower_flops(shape, replace(step, lengths=read))
        for length in read:
            flops += length.prompt_tokens * shape.flops_per_token(length.prompt_tokens)
        for length in going_on:
            # The first of these tokens sees the prompt, the last one the prompt and all others.
            flops += so_far * shape.flops_per_token(2 * length.prompt_tokens + so_far)
    return flops


def _prompts(shape: Shape, step: Passes, config: RunConfig) -> float:
    """FLOPs of the prompts and images of one step's completions."""
    once = config.rollout.samples_per_prompt if config.rollout.prefix_caching else 1
    prompts, seen = step.prompts
    return prompts * shape.flops_per_token(seen) / once + image_cost.tower_flops(shape, step)
