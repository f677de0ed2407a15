"""The rows of a run as the loop knows them: how long each is, and which of them can be used."""

from __future__ import annotations

import time
from dataclasses import astuple
from itertools import pairwise

import numpy as np

from trainer.config import RunConfig, Split
from trainer.data import lengths
from trainer.data.dataset import Dataset
from trainer.data.reader import Datasets
from trainer.ranks.process import RankProcess
from trainer.ranks.ray_ranks import RayRanks

ROWS_PER_CALL = 1024
PROGRESS_S = 10.0


class Rows:
    """Datasets, and the lengths of their rows, which the ranks measure side by side before they load
    anything."""

    def __init__(self, config: RunConfig, ranks: RayRanks, datasets: Datasets) -> None:
        self.config = config
        self.ranks = ranks
        self.datasets = datasets
        self._lengths: dict[Split, np.ndarray] = {}
        self._usable: dict[Split, list[int]] = {}

    def dataset(self, split: Split) -> Dataset:
        """The split's dataset."""
        return self.datasets[split]

    def lengths(self, split: Split) -> np.ndarray:
        """Tokens of prompts and solutions of a split's rows, [rows, 2]; see trainer/data/lengths.py."""
        if split not in self._lengths:
            dataset = self.datasets[split]
            rows = min(len(dataset), split.max_rows or len(dataset))
            processor = self.ranks.first(RankProcess.processor_fingerprint)
            prompting = astuple(dataset.prompting)
            key = [dataset.fingerprint, split.name, rows, self.config.method, processor, prompting]
            self._lengths[split] = lengths.cached_lengths(key, lambda: self._measure(split, rows))
        return self._lengths[split]

    def prompt_tokens(self, split: Split) -> np.ndarray:
        """Tokens of every row's prompt, [rows]."""
        return self.lengths(split)[:, 0]

    def usable(self, split: Split) -> list[int]:
        """Indices of the rows that are not too long and have what the method needs."""
        if split not in self._usable:
            self._usable[split] = lengths.usable_rows(self.config, self.lengths(split), split)
        return self._usable[split]

    def left_out(self, split: Split) -> int:
        """How many rows are not usable."""
        return len(self.lengths(split)) - len(self.usable(split))

    def _measure(self, split: Split, rows: int) -> np.ndarray:
        """Each rank measures one contiguous slice, so that it reads each row group once. It does so in
        pieces, so that progress can be shown."""
        world_size = self.ranks.world_size
        cuts = [rows * rank // world_size for rank in range(world_size + 1)]
        slices = list(pairwise(cuts))
        out, shown = np.zeros((rows, 2), np.int32), time.monotonic()
        done = 0
        for offset in range(0, max(stop - start for start, stop in slices), ROWS_PER_CALL):
            begins = [(min(start + offset, stop), stop) for start, stop in slices]
            pieces = [(split, begin, min(begin + ROWS_PER_CALL, stop)) for begin, stop in begins]
            measured = self.ranks.each(RankProcess.lengths, pieces)
            for (_, start, stop), part in zip(pieces, measured, strict=True):
                out[start:stop] = part
                done += stop - start
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                print(f"data: {done} of {rows} rows of {split.name} measured", flush=True)
        return out
