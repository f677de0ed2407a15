"""A step of the rollout log as one file: NumPy arrays without pickles, each with a CRC."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from trainer.algorithm.traces import Outcome, Trace, completed_trace
from trainer.checkpoint.trace_columns import cut_pieces, prompts_of, text_array, trace_columns, traces_of

FORMAT = "spotrl-rollout-3"
SECOND_FORMAT, FIRST_FORMAT = "spotrl-rollout-2", "spotrl-rollout-1"
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
    arrays = {"about": text_array(about)} | _columns(graded.traces)
    arrays["outcomes"] = text_array(list(map(astuple, graded.outcomes)))
    if graded.teacher is not None:
        arrays["teacher"] = np.concatenate(graded.teacher)
        arrays["teacher_tokens"] = np.array(list(map(len, graded.teacher)), np.int64)
    if graded.waiting:
        arrays |= {f"{WAITING}{name}": column for name, column in _columns(graded.waiting).items()}
    out = io.BytesIO()
    np.savez(out, **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


def _columns(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Traces with their texts; `_traces` reads them back."""
    columns = trace_columns(traces)
    columns["texts"] = text_array([trace.text for trace in traces])
    if any(trace.dialog for trace in traces):
        columns["dialogs"] = text_array([trace.dialog for trace in traces])
    return columns


def _traces(columns: dict[str, np.ndarray]) -> list[Trace]:
    """The inverse of `_columns`."""
    traces = traces_of(columns, json.loads(columns["texts"].tobytes()))
    if "dialogs" not in columns:
        return traces
    dialogs = json.loads(columns["dialogs"].tobytes())
    return [replace(trace, dialog=tuple(dialog)) for trace, dialog in zip(traces, dialogs, strict=True)]


def graded_of(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> GradedStep:
    """The inverse of `archive_of`. Raises one of DAMAGED."""
    if about["format"] == SECOND_FORMAT:
        arrays |= _one_segment(arrays)
    traces = _first_format(arrays) if about["format"] == FIRST_FORMAT else _traces(arrays)
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


def _first_format(arrays: dict[str, np.ndarray]) -> list[Trace]:
    """Traces of a log that was written before there were any: one completion each, all of it learned."""
    texts = json.loads(arrays["texts"].tobytes())
    prompts = prompts_of(arrays)
    completions = cut_pieces(arrays["token_ids"], arrays["tokens"])
    logprobs = cut_pieces(arrays["logprobs"], arrays["tokens"])
    traces = []
    for i, group in enumerate(arrays["group"].tolist()):
        version = int(arrays["weight_version"][i])
        trace = completed_trace(
            prompts[group],
            completions[i],
            group=group,
            row=int(arrays["row"][i]),
            index=int(arrays["index"][i]),
            logprobs=logprobs[i],
            version=version,
            end="stop" if arrays["finished"][i] else "length",
            text=texts[i],
        )
        traces.append(trace)
    return traces
