"""Traces as files: NumPy archives without pickles, each array with a CRC. A step of the rollout log is one,
and so is what a rollout worker sends of a unit."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from trainer.algorithm.traces import End, ImageRef, Outcome, Trace

FORMAT = "spotrl-rollout-3"
SECOND_FORMAT = "spotrl-rollout-2"
WAITING = "waiting_"
"""What the columns of completions of later steps begin with."""
DAMAGED = (OSError, ValueError, LookupError, EOFError, TypeError, zipfile.BadZipFile)
"""What reading an archive raises that is not whole, or is none."""


@dataclass(frozen=True)
class GradedStep:
    """A step's completions, in the order of the loop, with what the grader said of each."""

    traces: list[Trace]
    outcomes: list[Outcome]
    stats: dict[str, float]
    """The grader's metrics of the batch."""
    teacher: list[np.ndarray] | None = None
    """Log-probabilities of the learned tokens under the teacher, [T] float32 per trace, [0] of traces that
    are not trained on; None: not asked yet."""
    waiting: Sequence[Trace] = ()
    """Completions of later steps, so far, where they are carried over. Their groups count on from the step's:
    with P prompts a step, group P is the first of the next step."""


def archive_of(about: dict[str, Any], graded: GradedStep) -> bytes:
    """A step's traces and outcomes as one NumPy archive; `graded_of` reads it back without loss."""
    arrays = _columns(graded.traces)
    arrays["outcomes"] = text_array(list(map(astuple, graded.outcomes)))
    if graded.teacher is not None:
        arrays["teacher"] = np.concatenate(graded.teacher)
        arrays["teacher_tokens"] = np.array(list(map(len, graded.teacher)), np.int64)
    if graded.waiting:
        arrays |= {f"{WAITING}{name}": column for name, column in _columns(graded.waiting).items()}
    return packed_arrays(about, arrays)


def packed_arrays(about: Any, arrays: dict[str, np.ndarray]) -> bytes:
    """One archive of arrays, and of JSON data that say what they are."""
    out = io.BytesIO()
    np.savez(out, about=text_array(about), **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


def _columns(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    columns = trace_columns(traces)
    columns["texts"] = text_array([trace.text for trace in traces])
    if any(trace.dialog for trace in traces):
        columns["dialogs"] = text_array([trace.dialog for trace in traces])
    return columns


def _traces(columns: dict[str, np.ndarray]) -> list[Trace]:
    traces = traces_of(columns, json.loads(columns["texts"].tobytes()))
    if "dialogs" not in columns:
        return traces
    dialogs = json.loads(columns["dialogs"].tobytes())
    return [replace(trace, dialog=tuple(dialog)) for trace, dialog in zip(traces, dialogs, strict=True)]


def graded_of(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> GradedStep:
    """The inverse of `archive_of`. Raises one of DAMAGED."""
    if about["format"] == SECOND_FORMAT:
        arrays |= _one_segment(arrays)
    traces = _traces(arrays)
    outcomes = [Outcome(*outcome) for outcome in json.loads(arrays["outcomes"].tobytes())]
    if not traces or len(outcomes) != len(traces):
        raise ValueError(f"it has {len(traces)} completions and {len(outcomes)} outcomes")
    teacher = cut_pieces(arrays["teacher"], arrays["teacher_tokens"]) if "teacher" in arrays else None
    if teacher is not None and len(teacher) != len(traces):
        raise ValueError(f"it has {len(traces)} completions, and a teacher's judgment of {len(teacher)}")
    columns = {name[len(WAITING) :]: arrays[name] for name in arrays if name.startswith(WAITING)}
    return GradedStep(traces, outcomes, about["stats"], teacher, _traces(columns) if columns else ())


def _one_segment(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The segments of a log in which every trace was sampled by one version, or by none."""
    prompts = prompts_of(arrays)
    starts = np.array([len(prompts[group]) for group in arrays["group"].tolist()], np.int64)
    versions = arrays["versions"][:, 0]
    segments = np.stack([starts, versions], 1)
    return {"segments": segments[versions >= 0], "segment_counts": (versions >= 0).astype(np.int64)}


# --- traces as columns --------------------------------------------------------------------------------------

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
    learned = [np.flatnonzero(mask).astype(np.int32) for mask in cut_pieces(flat_mask, lengths)]
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
