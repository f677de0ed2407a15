"""Traces as columns of numbers: what the rollout log and the units of a fleet's workers have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.algorithm.traces import End, ImageRef, Trace

ENDS: tuple[End, ...] = ("stop", "length", "turns", "error", "cut", "images")
"""Values of `Trace.end` by their number in a column; new ones are added at the end."""
_NOTHING = np.zeros(0, np.float32)


def trace_columns(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """All of the traces but their text; `traces_of` reads them back without loss."""
    prompts: dict[int, np.ndarray] = {}
    completions = []
    masks = []
    logprobs = []
    images = []
    for trace in traces:
        prompts[trace.group] = trace.prompt
        completions.append(trace.completion)
        masks.append(_mask(trace))
        if trace.logprobs is not None:
            logprobs.append(trace.logprobs)
        for image in trace.images:
            images.append((image.row, image.number))
    prompt_ids = list(prompts.values())

    columns = _numbers(traces)
    columns["token_ids"] = np.concatenate(completions)
    columns["learned"] = np.packbits(np.concatenate(masks))
    columns["logprobs"] = np.concatenate([_NOTHING, *logprobs])
    columns["image_refs"] = np.array(images, np.int64).reshape(-1, 2)
    columns["prompt_group"] = np.array(list(prompts), np.int64)
    columns["prompt_tokens"] = _lengths(prompt_ids)
    columns["prompt_token_ids"] = np.concatenate(prompt_ids)
    return columns


def _numbers(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """What each trace has one of."""
    numbers = []
    ends = []
    counts = []
    segments = []
    sampled = []
    for trace in traces:
        numbers.append((trace.group, trace.row, trace.index, len(trace.completion), len(trace.images)))
        ends.append(ENDS.index(trace.end))
        counts.append(len(trace.segments))
        segments += trace.segments
        sampled.append(trace.logprobs is not None)
    table = np.array(numbers, np.int64).reshape(-1, 5)
    columns = dict(zip(("group", "row", "index", "tokens", "images"), table.T.copy(), strict=True))
    columns["end"] = np.array(ends, np.int8)
    columns["segments"] = np.array(segments, np.int64).reshape(-1, 2)
    columns["segment_counts"] = np.array(counts, np.int64)
    columns["sampled"] = np.array(sampled, bool)
    return columns


def _lengths(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.array(list(map(len, pieces)), np.int64)


def traces_of(arrays: dict[str, np.ndarray], texts: Sequence[str]) -> list[Trace]:
    """The traces of these columns. Raises ValueError or LookupError where the columns do not fit together."""
    prompts = prompts_of(arrays)
    completions = cut_pieces(arrays["token_ids"], arrays["tokens"])
    groups = arrays["group"].tolist()
    lengths = arrays["tokens"] + _lengths([prompts[group] for group in groups])
    flat_mask = np.unpackbits(arrays["learned"], count=int(lengths.sum())).astype(bool)
    learned = []
    for mask in cut_pieces(flat_mask, lengths):
        learned.append(np.flatnonzero(mask).astype(np.int32))
    sampled = arrays["sampled"]
    # A trace that no engine sampled has no log-probabilities in the column.
    logprobs = cut_pieces(arrays["logprobs"], np.where(sampled, _lengths(learned), 0))
    images = cut_pieces(arrays["image_refs"], arrays["images"])
    segments = cut_pieces(arrays["segments"], arrays["segment_counts"])

    traces = []
    for i, group in enumerate(groups):
        traces.append(
            Trace(
                group=group,
                row=int(arrays["row"][i]),
                index=int(arrays["index"][i]),
                tokens=np.concatenate([prompts[group], completions[i]]),
                shared=len(prompts[group]),
                learned=learned[i],
                logprobs=logprobs[i] if sampled[i] else None,
                images=tuple(ImageRef(row, number) for row, number in images[i].tolist()),
                segments=tuple((start, version) for start, version in segments[i].tolist()),
                end=ENDS[arrays["end"][i]],
                text=texts[i],
            )
        )
    return traces


def prompts_of(arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Prompt tokens by group."""
    ids = cut_pieces(arrays["prompt_token_ids"], arrays["prompt_tokens"])
    return dict(zip(arrays["prompt_group"].tolist(), ids, strict=True))


def text_array(value: Any) -> np.ndarray:
    """JSON data as an array of bytes, for archives without pickles."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def cut_pieces(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of `flat` of these lengths. Raises ValueError where they do not add up."""
    if int(lengths.sum()) != len(flat):
        raise ValueError(f"{len(flat)} values for lengths that add up to {int(lengths.sum())}")
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _mask(trace: Trace) -> np.ndarray:
    """Whether each token is learned, [L] bool."""
    mask = np.zeros(len(trace.tokens), bool)
    mask[trace.learned] = True
    return mask
