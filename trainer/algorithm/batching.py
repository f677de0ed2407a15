"""From samples to micro-batches: who computes what, and the tensors of one forward pass. No framework but torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


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
    """One answer to learn from."""

    row: int
    """Dataset index of its prompt."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The answer, [T]."""
    advantage: float
    rollout_logprobs: list[float]
    """Of the engine, [T]."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)


def schedule(lengths: Sequence[int], world_size: int, micro_batch: int) -> list[list[list[int]]]:
    """Deals items to ranks: `[rank][micro-batch] -> indices`, every rank with the same number of micro-batches.

    Items are sorted by length, so that a micro-batch holds little padding, and the micro-batches that run at the same
    time on all ranks are about equally long. Ties keep their order: equal input gives equal schedules.
    Raises ValueError if the items do not divide.
    """
    block = world_size * micro_batch
    if len(lengths) % block:
        raise ValueError(f"{len(lengths)} items do not divide by {world_size} ranks x {micro_batch}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for start in range(0, len(order), block):
        for rank in range(world_size):
            ranks[rank].append(order[start + rank : start + block : world_size])
    return ranks


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass: B sequences padded on the right to T, their N answer tokens laid flat."""

    input_ids: Tensor
    """[B, T]"""
    position_ids: Tensor
    """[3, B, T]"""
    attention_mask: Tensor
    """[B, T], 1 on real tokens"""
    answer_at: Tensor
    """[N]: flat index into B*T of the position that predicts each answer token"""
    targets: Tensor
    """[N]: the answer tokens"""
    lengths: Tensor
    """[B]: answer tokens per sequence"""
    pixel_values: Tensor | None = None
    """[patches, dim] of the distinct prompts in this micro-batch; None: no picture in it"""
    grid_thw: Tensor | None = None
    """[images, 3]"""
    image_at: Tensor | None = None
    """[K]: flat index into B*T of every image token"""
    image_feature: Tensor | None = None
    """[K]: which row of the vision tower's output belongs there"""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in moved.items()})


def collate(
    items: Sequence[tuple[int, list[int], list[int]]],
    encoded: Callable[[int], Encoded],
    positions: Callable[[list[int], Tensor | None], Tensor],
    image_token_id: int | None,
    pad_token_id: int,
    merge_size: int,
) -> MicroBatch:
    """Builds a micro-batch from (row, prompt ids, answer ids).

    encoded: row -> Encoded (called once per distinct row). positions: full ids and grid -> [3, length], computed per
    sequence before padding. Samples of one prompt share its pixels, so the tower sees each picture once.
    """
    sequences = [prompt + answer for _, prompt, answer in items]
    width = max(map(len, sequences))
    size = len(items)
    input_ids = torch.full((size, width), pad_token_id)
    mask = torch.zeros(size, width, dtype=torch.long)
    position_ids = torch.zeros(3, size, width, dtype=torch.long)
    answer_at, image_at, image_feature = [], [], []
    prompts: dict[int, tuple[Encoded, int]] = {}  # row -> (prompt, its first row of features)
    features = 0
    for b, ((row, prompt, _), sequence) in enumerate(zip(items, sequences, strict=True)):
        n = len(sequence)
        if row not in prompts:
            prompts[row] = (encoded(row), features)
            grid = prompts[row][0].grid_thw
            features += 0 if grid is None else int(grid.prod(-1).sum()) // merge_size**2
        enc, first = prompts[row]
        input_ids[b, :n] = torch.tensor(sequence)
        mask[b, :n] = 1
        position_ids[:, b, :n] = positions(sequence, enc.grid_thw)
        answer_at.append(torch.arange(len(prompt) - 1, n - 1) + b * width)
        if enc.grid_thw is not None:
            slots = torch.tensor([i for i, token in enumerate(prompt) if token == image_token_id])
            image_at.append(slots + b * width)
            image_feature.append(torch.arange(len(slots)) + first)
    pixels = [p.pixel_values for p, _ in prompts.values() if p.pixel_values is not None]
    grids = [p.grid_thw for p, _ in prompts.values() if p.grid_thw is not None]
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=mask,
        answer_at=torch.cat(answer_at),
        targets=torch.tensor([t for _, _, answer in items for t in answer]),
        lengths=torch.tensor([len(answer) for _, _, answer in items]),
        pixel_values=torch.cat(pixels) if pixels else None,
        grid_thw=torch.cat(grids) if grids else None,
        image_at=torch.cat(image_at) if pixels else None,
        image_feature=torch.cat(image_feature) if pixels else None,
    )
