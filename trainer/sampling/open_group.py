"""A prompt whose completions are being sampled, in the form in which vLLM takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import Prompt, Trace
from trainer.data.processor import EngineRequest


def one_token_each(ids: Sequence[int], image_token_id: int | None) -> list[int]:
    """Token ids with one placeholder for each image, as processors take them; given with one per patch."""
    short = []
    for i, token in enumerate(ids):
        if token != image_token_id or i == 0 or ids[i - 1] != image_token_id:
            short.append(token)
    return short


def with_shown(rendered: dict[str, Any], shown: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """A prompt as vLLM takes it, with the images of what stands behind it, each from a position on."""
    if not shown:
        return rendered
    items = []
    hashes = []
    places = []
    for start, part in [(0, rendered), *shown]:
        if "mm_kwargs" in part:
            items += part["mm_kwargs"]["image"]
            hashes += part["mm_hashes"]["image"]
            places += [replace(at, offset=at.offset + start) for at in part["mm_placeholders"]["image"]]
    last = shown[-1][1]
    return {
        **last,
        "mm_kwargs": type(last["mm_kwargs"])({"image": items}),
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": places},
    }


class OpenGroup:
    """A prompt whose completions are being sampled."""

    def __init__(self, prompt: Prompt, request: EngineRequest, begun: dict[int, Trace | None]) -> None:
        """begun: what there is of each completion that is sampled, by index."""
        self.prompt, self.begun = prompt, begun
        self.prompt_ids = request.token_ids
        self.pixel_bytes = request.pixel_bytes
        self.images = request.images
        self.sampled = {index: len(trace.learned) if trace else 0 for index, trace in begun.items()}
        """Number of tokens of each completion that older weights sampled."""
        self.traces: dict[int, Trace] = {}
        self.rendered: dict[str, Any] = {}
        """The prompt as vLLM takes it."""
        self.shown: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        """Observations with images of each completion, as vLLM takes prompts, and where they start."""

    def so_far(self, index: int) -> list[int]:
        """What stands behind the prompt of a completion already."""
        trace = self.begun[index]
        return trace.completion.tolist() if trace else []

    def left(self, index: int, max_tokens: int) -> int:
        """Most tokens by which a completion's reply grows now; 0: it goes on in the next phase."""
        left = max_tokens - len(self.so_far(index))
        trace = self.begun[index]
        grown = len(trace.learned) - self.sampled[index] if trace else 0
        return min(left, self.prompt.cut - grown) if self.prompt.cut else left

    def extended(self, index: int) -> dict[str, Any]:
        """The prompt of a completion that goes on: the group's with the tokens so far and what they show."""
        rendered = with_shown(self.rendered, self.shown.get(index, ()))
        return {**rendered, "prompt_token_ids": [*self.rendered["prompt_token_ids"], *self.so_far(index)]}

    def seed(self, index: int) -> int:
        """Seed of what is sampled of a completion now."""
        trace = self.begun[index]
        if trace is None:
            return self.prompt.seed + index
        return seed_of(self.prompt.seed, index, len(trace.segments))
