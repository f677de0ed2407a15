"""From traces to the tensors of one forward pass: one packed row in which traces of one prompt share its
tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.algorithm.scheduling import SampleLength
from trainer.algorithm.traces import Trace

T = TypeVar("T")


class EncodedImages(Protocol):
    """An encoded prompt without its token ids: what the policy reads of its images."""

    @property
    def pixel_values(self) -> Tensor | None:
        """[patches, values per patch]"""

    @property
    def grid_thw(self) -> Tensor | None:
        """[images, 3]"""


@dataclass(frozen=True)
class TrainBatch:
    """Traces to learn from, and the inputs of the loss for each. Every list is as long as `traces`."""

    traces: list[Trace]
    advantages: list[np.ndarray]
    """Advantage of every learned token, [T] float32 per trace."""
    old: list[np.ndarray] | None = None
    """Log-probabilities under the policy before the step's first update, [T] float32 per trace. None if the
    policy has not moved since the rollout: the forward pass itself then gives the old log-probabilities."""
    reference: list[np.ndarray] | None = None
    """Log-probabilities under the reference, [T] float32 per trace; None if the loss has no KL term."""

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def tokens(self) -> int:
        """Number of learned tokens."""
        return sum(len(trace.learned) for trace in self.traces)

    def pick(self, indices: Sequence[int]) -> TrainBatch:
        """The batch of these traces, in this order."""

        def taken(column: list[T]) -> list[T]:
            return [column[i] for i in indices]

        return TrainBatch(
            traces=taken(self.traces),
            advantages=taken(self.advantages),
            old=None if self.old is None else taken(self.old),
            reference=None if self.reference is None else taken(self.reference),
        )


def trace_length(trace: Trace, image_token_id: int) -> SampleLength:
    """What the schedule of passes needs to know of a trace."""
    image_tokens = int(np.count_nonzero(trace.prompt == image_token_id))
    shown_later = int(np.count_nonzero(trace.completion == image_token_id))
    return SampleLength(trace.context, trace.shared, len(trace.completion), image_tokens, shown_later)


@dataclass(frozen=True)
class Layout:
    """The keys that each stretch of queries attends to. A stretch has its own list of keys, and its causal
    mask is aligned to the right end of both, as in flash-attn 2.1 and newer."""

    q: tuple[int, ...]
    """Number of queries of each stretch; the stretches together are the row."""
    k: tuple[int, ...]
    """Number of keys of each stretch."""
    cu_q: Tensor
    """int32 [stretches + 1]: running sums of `q`."""
    cu_k: Tensor
    kv_index: Tensor | None
    """[sum of k]: position of each key in the row; None: keys have the positions of the queries."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass over a row of T tokens, [prompt | completion | completion | prompt | ...],
    with N completion tokens."""

    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[3, 1, T]: positions that each sample would have if it were alone in the row"""
    logits_at: Tensor
    """[N]: the position that predicts each completion token; the last position of a prompt predicts the first
    token of all its completions"""
    targets: Tensor
    """[N]: the completion tokens, sample after sample"""
    layout: Layout
    pixel_values: Tensor | None = None
    """[patches, dim] of the distinct prompts; None: no image"""
    grids: tuple[tuple[int, int, int], ...] = ()
    """Frames, rows and columns of patches of each image, in the order of the images' tokens in the row. They
    are Python numbers, because reading a tensor on a GPU would wait for everything that is queued there."""


def move_record(record: Any, device: torch.device) -> Any:
    """A dataclass of tensors, nested or not, on `device`; copies from pinned memory do not wait."""
    return _changed(record, lambda tensor: send_tensor(tensor, device))


def pin_record(record: Any) -> Any:
    """A dataclass of tensors, nested or not, in page-locked memory."""
    return _changed(record, Tensor.pin_memory)


def _changed(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    values = {}
    for name, value in vars(record).items():
        if isinstance(value, Tensor):
            values[name] = change(value)
        elif isinstance(value, MicroBatch | Layout):
            values[name] = _changed(value, change)
    return replace(record, **values)


def send_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`; a copy to a GPU does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def collate(
    traces: Sequence[Trace],
    encoded: Callable[[Trace], EncodedImages],
    positions: Callable[[list[int], Tensor | None], Tensor],
    observed: Callable[[Trace], EncodedImages | None] = lambda trace: None,
) -> MicroBatch:
    """Packs traces into one row. A prompt that several traces share is in the row once, before the first of
    their completions.

    encoded: pixels of a trace's prompt. positions: (token ids, grid) -> rotary positions [3, P]. observed:
    pixels of the images behind a trace's prompt; None: there are none. Without traces the row has one token
    and no targets, for a rank that must make the pass with the others.
    """
    row = _PackedRow(positions, observed)
    for trace in traces:
        if trace.context not in row.prompts:
            row.add_prompt(trace, encoded(trace))
        else:
            row.add_continuation(trace)
    return row.micro_batch() if traces else _EMPTY


@dataclass(frozen=True)
class _Placed:
    """Where a prompt stands in the row."""

    start: int
    size: int
    next_position: int
    """Rotary position of the first token behind the prompt."""


class _PackedRow:
    """The row while it grows: [prompt | completion | completion | prompt | ...]."""

    def __init__(
        self, positions: Callable[..., Tensor], observed: Callable[[Trace], EncodedImages | None]
    ) -> None:
        """positions, observed: as in `collate`."""
        self.positions, self.observed = positions, observed
        self.prompts: dict[Hashable, _Placed] = {}
        self.length = 0
        self.ids: list[np.ndarray] = []
        self.places: list[Tensor] = []
        self.predictors: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.q: list[int] = []
        self.k: list[int] = []
        self.keys: list[Tensor] = []
        self.pixels: list[Tensor] = []
        self.grids: list[tuple[int, int, int]] = []

    def add_prompt(self, trace: Trace, encoded: EncodedImages) -> None:
        """Adds a prompt that the row does not have yet, and the trace's completion right behind it."""
        place = self.positions(trace.prompt.tolist(), encoded.grid_thw)
        prompt = _Placed(self.length, trace.shared, int(place.max()) + 1)
        self.prompts[trace.context] = prompt
        self._add_images(encoded)
        self.ids.append(trace.prompt)
        self.places.append(place)
        self.q.append(len(trace.tokens))
        self.k.append(len(trace.tokens))
        self.keys.append(torch.arange(prompt.start, prompt.start + len(trace.tokens)))
        self.length += trace.shared
        self._add_completion(trace, prompt)

    def add_continuation(self, trace: Trace) -> None:
        """Adds a completion of a prompt that the row has; its queries see that prompt and itself."""
        prompt = self.prompts[trace.context]
        count = len(trace.completion)
        if count:
            self.q.append(count)
            self.k.append(prompt.size + count)
            self.keys.append(torch.arange(prompt.start, prompt.start + prompt.size))
            self.keys.append(torch.arange(self.length, self.length + count))
        self._add_completion(trace, prompt)

    def _add_completion(self, trace: Trace, prompt: _Placed) -> None:
        # The token before a learned one predicts it; the prompt's last token predicts the first of every
        # completion.
        before = trace.learned.astype(np.int64) - 1
        moved_by = np.where(before < prompt.size, prompt.start, self.length - prompt.size)
        self.predictors.append(before + moved_by)
        self.targets.append(trace.tokens[trace.learned])

        count = len(trace.completion)
        self.ids.append(trace.completion)
        observed = self.observed(trace)
        if observed is None:
            place = torch.arange(count).expand(3, count)
        else:
            place = self.positions(trace.completion.tolist(), observed.grid_thw)
            self._add_images(observed)
        self.places.append(place + prompt.next_position)
        self.length += count

    def _add_images(self, encoded: EncodedImages) -> None:
        if encoded.pixel_values is not None and encoded.grid_thw is not None:
            self.pixels.append(encoded.pixel_values)
            for frames, rows, columns in encoded.grid_thw.tolist():
                self.grids.append((frames, rows, columns))

    def micro_batch(self) -> MicroBatch:
        """The row as tensors."""
        # Stretches that see no more than themselves need no index of keys.
        apart = self.q == self.k
        return MicroBatch(
            input_ids=_int64(self.ids)[None],
            position_ids=torch.cat(self.places, 1)[:, None],
            logits_at=_int64(self.predictors),
            targets=_int64(self.targets),
            layout=build_layout(self.q, self.k, None if apart else torch.cat(self.keys)),
            pixel_values=torch.cat(self.pixels) if self.pixels else None,
            grids=tuple(self.grids),
        )


def _int64(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def build_layout(q: Sequence[int], k: Sequence[int], kv_index: Tensor | None = None) -> Layout:
    """Stretches of `q` queries with `k` keys each."""
    return Layout(tuple(q), tuple(k), _running_sums(q), _running_sums(k), kv_index)


def _running_sums(counts: Sequence[int]) -> Tensor:
    """0, followed by the sum of the counts up to each, int32 [counts + 1]."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


_EMPTY = MicroBatch(
    input_ids=torch.zeros(1, 1, dtype=torch.long),
    position_ids=torch.zeros(3, 1, 1, dtype=torch.long),
    logits_at=torch.zeros(0, dtype=torch.long),
    targets=torch.zeros(0, dtype=torch.long),
    layout=build_layout([1], [1]),
)
"""What a rank without traces computes: one token, nothing learned."""
