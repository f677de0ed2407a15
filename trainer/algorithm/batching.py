"""From samples to the tensors of one forward pass: one packed row in which samples of one prompt share its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.algorithm.scheduling import Length


class Encoded(Protocol):
    """What the policy needs of an encoded prompt besides its token ids."""

    @property
    def pixel_values(self) -> Tensor | None:
        """[patches, values per patch]"""

    @property
    def grid_thw(self) -> Tensor | None:
        """[images, 3]"""


@dataclass(frozen=True)
class TrainItem:
    """One completion to learn from."""

    row: int
    """Dataset index of its prompt."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The completion, [T]."""
    advantage: float
    """Of the sequence; where its tokens' differ, their mean."""
    rollout_logprobs: list[float] | None = None
    """Of the engine, [T]; None: no engine sampled it."""
    token_advantages: list[float] | None = None
    """[T]; None: `advantage`, discounted by gamma."""
    old_logprobs: list[float] | None = None
    """Of the policy before the step's first update, [T]; None: it has not moved since, so its own are the old ones."""
    ref_logprobs: list[float] | None = None
    """Of the reference, [T]; None: no KL term."""
    learned: tuple[int, ...] = ()
    """Positions of the prompt that supervised training learns too, before the completion."""

    @property
    def targets(self) -> int:
        """Tokens that are learned."""
        return len(self.learned) + len(self.token_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def scheduled(self, image_token_id: int) -> Length:
        """What the schedule needs to know."""
        prompt = self.prompt_token_ids
        return Length(self.row, len(prompt), len(self.token_ids), prompt.count(image_token_id))


@dataclass(frozen=True)
class Layout:
    """Which keys each stretch of queries sees: its own list of them, causal from the right end (as flash-attn 2.1+)."""

    q: tuple[int, ...]
    """Queries of each stretch; the row is cut into them."""
    k: tuple[int, ...]
    """Keys of each."""
    cu_q: Tensor
    """int32 [stretches + 1]: running sums of `q`."""
    cu_k: Tensor
    kv_index: Tensor | None
    """[sum of k]: where in the row each key stands; None: keys lie like queries."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass over a row of T tokens, [prompt | completion | completion | prompt | ...], with N
    completion tokens."""

    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[3, 1, T]: of each sample as if it stood alone"""
    logits_at: Tensor
    """[N]: the position that predicts each completion token; a prompt's last one does so for all its completions"""
    targets: Tensor
    """[N]: the completion tokens, sample after sample"""
    layout: Layout
    pixel_values: Tensor | None = None
    """[patches, dim] of the distinct prompts; None: no image"""
    grids: tuple[tuple[int, int, int], ...] = ()
    """Of each image its frames, rows and columns of patches, in the order of the row, whose image tokens are theirs.
    Numbers: of a tensor on a GPU each reading would wait for all that is queued there."""


def moved(record: Any, device: torch.device) -> Any:
    """A dataclass of tensors, nested or not, on `device`; copies from pinned memory do not wait."""
    values = {}
    for name, value in vars(record).items():
        if isinstance(value, Tensor):
            values[name] = sent(value, device)
        elif isinstance(value, MicroBatch | Layout):
            values[name] = moved(value, device)
    return replace(record, **values)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`; a copy to a GPU does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def collate(
    items: Sequence[tuple[int, list[int], list[int]]],
    encoded: Callable[[int], Encoded],
    positions: Callable[[list[int], Tensor | None], Tensor],
    learned: Sequence[Sequence[int]] = (),
) -> MicroBatch:
    """Packs (row, prompt ids, completion ids) into one row; each prompt stands in it once, with its first completion.

    encoded: row -> Encoded. positions: prompt ids and grid -> [3, P]. learned: of each item, positions of its prompt
    that are targets before its completion's tokens. No items: a row of one token without targets, for a rank that must
    make the pass with the others.
    """
    ids, at, targets, places, keys = [], [], [], [], []
    q, k = [], []
    seen: dict[int, tuple[int, int, int]] = {}  # row -> start, length, first position of a completion
    pixels, grids = [], []
    for (row, prompt, completion), also in zip(items, learned or [()] * len(items), strict=True):
        n = len(completion)
        if row not in seen:
            start, enc = len(ids), encoded(row)
            place = positions(prompt, enc.grid_thw)
            seen[row] = start, len(prompt), int(place.max()) + 1
            places.append(place)
            ids += prompt
            if enc.pixel_values is not None and enc.grid_thw is not None:
                pixels.append(enc.pixel_values)
                grids += [(t, h, w) for t, h, w in enc.grid_thw.tolist()]
            q.append(len(prompt) + n)
            keys.append(torch.arange(start, start + len(prompt) + n))
        elif n:
            start, size, _ = seen[row]
            q.append(n)
            keys += [torch.arange(start, start + size), torch.arange(len(ids), len(ids) + n)]
        start, size, first = seen[row]
        if n:
            k.append(size + n)
        elif len(k) < len(q):
            k.append(size)
        at += [start + j - 1 for j in also]
        at += [start + size - 1, *range(len(ids), len(ids) + n - 1)][:n]
        places.append((torch.arange(n) + first).expand(3, n))
        ids += completion
        targets += [*(prompt[j] for j in also), *completion]
    if not items:
        ids, places, q, k = [0], [torch.zeros(3, 1, dtype=torch.long)], [1], [1]
    return MicroBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.cat(places, 1)[:, None],
        logits_at=torch.tensor(at, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        layout=layout(q, k, torch.cat(keys) if q != k else None),
        pixel_values=torch.cat(pixels) if pixels else None,
        grids=tuple(grids),
    )


def layout(q: Sequence[int], k: Sequence[int], kv_index: Tensor | None = None) -> Layout:
    """Stretches of `q` queries with `k` keys each."""
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (q, k))
    return Layout(tuple(q), tuple(k), cu_q, cu_k, kv_index)
