"""Rows as the engine and the policy read them. Images are decoded once, within a bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from trainer.config import RunConfig, Split
from trainer.config.turns import images_of
from trainer.data import lengths
from trainer.data.dataset import Dataset
from trainer.data.processor import EncodedPrompt, EngineRequest, Prompter
from trainer.data.prompts import PromptWording
from trainer.images.decoding import decode_image
from trainer.turns.environments import tools_of


class Datasets:
    """The datasets of a run, each opened once, with the run's system prompt."""

    def __init__(self, config: RunConfig) -> None:
        self._prompting = PromptWording.of(config)
        self._open: dict[tuple[str, str], Dataset] = {}

    def __getitem__(self, split: Split) -> Dataset:
        key = split.path, split.name
        if key not in self._open:
            self._open[key] = Dataset(*key, prompting=self._prompting)
        return self._open[key]


class RowReader:
    """Reads rows for one process. Safe to use from the process's main thread and its look-ahead at once."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.datasets = Datasets(config)
        self.cache = ByteCache(int(config.data.image_cache_gib * 2**30))
        self._look_ahead = ThreadPoolExecutor(1, "images")

    @cached_property
    def prompter(self) -> Prompter:
        """The model's processor. It is loaded before the model, since the rows' lengths depend on it."""
        prompter = Prompter(self.config.model, tools_of(self.config.turns))
        if self.config.method == "grpo":
            prompter.check_longest(self.config.longest_sequence)
        return prompter

    @property
    def image_token_id(self) -> int:
        """The id of an image's placeholder; -1 where the model reads text only."""
        number = self.prompter.image_token_id
        return -1 if number is None else number

    def images_per_prompt(self) -> int:
        """Most images of any prompt of the run, with what is shown in later turns: an engine takes no more
        than it was built for."""
        splits = [self.config.train_split]
        if self.config.evaluation.every_steps:
            splits.append(self.config.evaluation_split)
        most = 1
        for split in splits:
            most = max(most, self.datasets[split].images_per_row)
        return most + images_of(self.config.turns)

    def lengths(self, split: Split, start: int, stop: int) -> np.ndarray:
        """Tokens of rows `start` to `stop`, [rows, 2]: prompt, and worked solution if solutions are trained
        on."""
        return lengths.measure_lengths(
            self.prompter, self.datasets[split], start, stop, self.config.method == "sft"
        )

    def decoded(self, split: Split, index: int) -> list[Image.Image]:
        """A row's images."""

        def decode_row() -> list[Image.Image]:
            row = self.datasets[split][index]
            return [decode_image(data, row.id) for data in row.images]

        return self.cache.get(("decoded", split.path, split.name, index), decode_row, decoded_bytes)

    def encoded(self, split: Split, index: int) -> EncodedPrompt:
        """A row's prompt as the policy reads it."""

        def encode_row() -> EncodedPrompt:
            return self.prompter.encode(self.datasets[split][index], self.decoded(split, index))

        key = ("encoded", split.path, split.name, index)
        return self.cache.get(key, encode_row, lambda encoded: encoded.size_bytes)

    def request(self, split: Split, index: int) -> EngineRequest:
        """A row's prompt as the engine reads it."""
        return self.prompter.request(self.datasets[split][index], self.decoded(split, index))

    def look_ahead(self, split: Split, rows: Sequence[int]) -> None:
        """Starts to decode the images of rows that are asked for next, in a thread."""
        self._look_ahead.submit(self._decode_ahead, split, rows)

    def _decode_ahead(self, split: Split, rows: Sequence[int]) -> None:
        # Half of the cache is at work: what is decoded ahead must not push that out.
        room = self.cache.limit_bytes // 2
        for row in rows:
            if room <= 0:
                return
            room -= decoded_bytes(self.decoded(split, row))


def decoded_bytes(images: Sequence[Image.Image]) -> int:
    """Memory that decoded images take."""
    return sum(4 * image.width * image.height for image in images)  # Pillow pads RGB to four bytes a pixel


ENTRY_BYTES = 512
"""Bytes that are counted for every entry in addition to its value."""


class ByteCache:
    """A cache that drops the least recently used values first. Several threads may use it; two of them may
    then make the same value."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """The value of `key`, made if it is not held. A value of more than `limit_bytes` is not kept."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        value = make()
        entry_bytes = size(value) + ENTRY_BYTES
        with self._lock:
            if key not in self._held and entry_bytes <= self.limit_bytes:
                self._held[key] = value, entry_bytes
                self.held_bytes += entry_bytes
                while self.held_bytes > self.limit_bytes:
                    _, (_, freed_bytes) = self._held.popitem(last=False)
                    self.held_bytes -= freed_bytes
        return value
