"""Traces as columns of numbers: what the rollout log and the units of a fleet's workers have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.algorithm.traces import End, ImageRef, Trace

ENDS: tuple[End, ...] = ("stop", "length", "turns", "error")
"""Values of `Trace.end` by their number in a column; new ones are added at the end."""


def trace_columns(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """All of the traces but their text; `traces_of` reads them back without loss."""
    prompts = {trace.group: trace.prompt for trace in traces}
    completions = [trace.completion for trace in traces]
    images = [(ref.row, ref.number) for trace in traces for ref in trace.images]

    columns = _numbers(traces)
    columns["token_ids"] = np.concatenate(completions)
    columns["learned"] = np.packbits(np.concatenate([_mask(trace) for trace in traces]))
    columns["logprobs"] = np.concatenate([_known(trace.logprobs) for trace in traces])
    columns["image_refs"] = np.array(images, np.int64).reshape(-1, 2)
    columns["prompt_group"] = np.array(list(prompts), np.int64)
    columns["prompt_tokens"] = np.array([len(ids) for ids in prompts.values()], np.int64)
    columns["prompt_token_ids"] = np.concatenate(list(prompts.values()))
    return columns


def _numbers(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """What each trace has one of."""
    rows = []
    for trace in traces:
        rows.append((trace.group, trace.row, trace.index, len(trace.completion), len(trace.images)))
    table = np.array(rows, np.int64).reshape(-1, 5)
    columns = dict(zip(("group", "row", "index", "tokens", "images"), table.T.copy(), strict=True))
    columns["end"] = np.array([ENDS.index(trace.end) for trace in traces], np.int8)
    columns["versions"] = np.array([trace.versions for trace in traces], np.int64)
    columns["sampled"] = np.array([trace.logprobs is not None for trace in traces], bool)
    return columns


def traces_of(arrays: dict[str, np.ndarray], texts: Sequence[str]) -> list[Trace]:
    """The traces of these columns. Raises ValueError or LookupError where the columns do not fit together."""
    prompts = prompts_of(arrays)
    completions = cut(arrays["token_ids"], arrays["tokens"])
    groups = arrays["group"].tolist()
    lengths = arrays["tokens"] + np.array([len(prompts[group]) for group in groups], np.int64)
    flat_mask = np.unpackbits(arrays["learned"], count=int(lengths.sum())).astype(bool)
    learned = [np.flatnonzero(mask).astype(np.int32) for mask in cut(flat_mask, lengths)]
    sampled = arrays["sampled"]
    counts = np.array([len(positions) for positions in learned], np.int64) * sampled
    logprobs = cut(arrays["logprobs"], counts)
    images = cut(arrays["image_refs"], arrays["images"])

    traces = []
    for i, group in enumerate(groups):
        oldest, newest = arrays["versions"][i].tolist()
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
                versions=(oldest, newest),
                end=ENDS[arrays["end"][i]],
                text=texts[i],
            )
        )
    return traces


def prompts_of(arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Prompt tokens by group."""
    ids = cut(arrays["prompt_token_ids"], arrays["prompt_tokens"])
    return dict(zip(arrays["prompt_group"].tolist(), ids, strict=True))


def text_array(value: Any) -> np.ndarray:
    """JSON data as an array of bytes, for archives without pickles."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of `flat` of these lengths. Raises ValueError where they do not add up."""
    if int(lengths.sum()) != len(flat):
        raise ValueError(f"{len(flat)} values for lengths that add up to {int(lengths.sum())}")
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _mask(trace: Trace) -> np.ndarray:
    """Whether each token is learned, [L] bool."""
    mask = np.zeros(len(trace.tokens), bool)
    mask[trace.learned] = True
    return mask


def _known(logprobs: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.float32) if logprobs is None else logprobs
