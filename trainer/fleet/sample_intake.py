"""What workers have sent: fetched side by side, and checked in order before it may train, by what can be said
without running the model.

A unit's samples are a function of its seeds. So a refused unit is sampled once more, by another worker
if there is one; refused again it ends the run.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from trainer.algorithm.traces import Trace
from trainer.checkpoint.rollout_archive import DAMAGED, packed_arrays, trace_columns, traces_of
from trainer.fleet.fleet_records import GivenUnit, RolloutUnit
from trainer.fleet.objects import Objects
from trainer.storage.seal import ForgedObject
from trainer.system.records import Count, Line, decode_record

ROUNDING = 1e-4
"""Nats above 0 that a log-probability may be by rounding."""
LEAST_LOGPROB = -1e4
"""Nats below which no sampled token is."""
NOT_FINITE = "a log-probability is not finite: its GPU or its weights are broken"
"""Ends a refusal that is its worker's alone: another worker would send something else."""
ABOUT_BYTES = 4 << 20
"""Largest part of a unit's samples that is not in its tokens."""
TOKEN_BYTES = 32
"""Most bytes that a token takes in a unit's samples."""
CERTAIN_TOKENS = 64
"""Sampled tokens of a unit that cannot all have been certain."""


UNREADABLE = (*DAMAGED, AttributeError, MemoryError, NotImplementedError, RecursionError)
"""What reading an archive raises that is not whole, is none, or holds something else than samples."""


class SamplesAbout(Struct, frozen=True):
    unit: dict[str, Any]
    """The unit as the worker was given it, which is compared field by field with what was asked."""
    turn: Count
    """How often the unit had been given out when this worker got it."""
    worker: Line


def pack_samples(unit: RolloutUnit, turn: int, worker: str, traces: Sequence[Trace]) -> bytes:
    """A unit's samples as one NumPy archive, without their text, which the head decodes from the tokens."""
    about = SamplesAbout(msgspec.to_builtins(unit), turn, worker)
    return packed_arrays(msgspec.to_builtins(about), trace_columns(traces))


def check_archive(body: bytes) -> None:
    """Raises ValueError for an archive whose arrays would take more memory than it has bytes: `pack_samples`
    packs nothing, so an array is as large as what it is read from."""
    total = 0
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        for info in archive.infolist():
            total += info.file_size
            if info.compress_type != zipfile.ZIP_STORED or total > len(body):
                raise ValueError(f"{info.filename} takes more memory than the archive has bytes")
            with archive.open(info) as member:
                if np.lib.format.read_magic(member) != (1, 0):
                    raise ValueError(f"{info.filename} is of another format")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(f"{info.filename} says that it holds {shape} of {dtype}, which it does not")


def unpack_samples(body: bytes) -> tuple[SamplesAbout, list[Trace]]:
    """The inverse of `pack_samples`. Raises one of UNREADABLE."""
    check_archive(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        arrays = dict(archive)
    about = decode_record(arrays["about"].tobytes(), SamplesAbout, "about")
    return about, traces_of(arrays, [""] * len(arrays["group"]))


@dataclass(frozen=True)
class AskedUnit:
    """What the head knows of the model and of its rows."""

    vocabulary: int
    ends: Collection[int]
    """Token ids at which the engine stops."""
    banned: Collection[int]
    row: Callable[[str, int], tuple[Sequence[int], int]]
    """(split, row) -> token ids of the row's prompt, and how many images it has."""

    def most_bytes(self, unit: RolloutUnit) -> int:
        """The largest object that holds a unit's samples."""
        prompts = [len(self.row(unit.split, prompt.row)[0]) for prompt in unit.prompts]
        tokens = int(unit.cost) * (unit.max_tokens + max(prompts, default=0))
        return ABOUT_BYTES + tokens * TOKEN_BYTES


def samples_refusal(
    unit: RolloutUnit,
    given: tuple[int, str],
    about: SamplesAbout,
    traces: Sequence[Trace],
    expected: AskedUnit,
) -> str:
    """Why a unit's samples may not train, as a sentence; empty where they may. given: turn and worker."""
    wanted_unit = msgspec.json.decode(msgspec.json.encode(unit))
    for name, value in wanted_unit.items():
        if about.unit.get(name) != value:
            return f"it was sampled for another unit: its {name} is {about.unit.get(name)!r}, not {value!r}"
    if about.unit.keys() != wanted_unit.keys():
        return "it was sampled for a unit with other fields: the worker's code is another"
    if (about.turn, about.worker) != given:
        return f"it is of turn {about.turn} and worker {about.worker}, not of {given[0]} and {given[1]}"

    rows = {prompt.group: prompt.row for prompt in unit.prompts}
    wanted = {(group, index) for group in rows for index in range(unit.samples_per_prompt)}
    sent = [(trace.group, trace.index) for trace in traces]
    if len(sent) != len(set(sent)):
        return "it has a completion twice"
    if surplus := set(sent) - wanted:
        return f"it has a completion that was not asked for: group and index {min(surplus)}"
    if missing := wanted - set(sent):
        return f"it lacks a completion: group and index {min(missing)}"

    for trace in traces:
        why = _trace(unit, rows[trace.group], trace, expected)
        if why:
            return f"group {trace.group}, completion {trace.index}: {why}"
    if unit.split == "train" and unit.temperature >= 1 and _all_certain(traces):
        return "every log-probability is 0, as if nothing had been sampled"
    return ""


def _all_certain(traces: Sequence[Trace]) -> bool:
    """Whether every token of a unit is said to have been certain."""
    logprobs = [trace.logprobs for trace in traces if trace.logprobs is not None]
    flat = np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32)
    return len(flat) >= CERTAIN_TOKENS and not flat.any()


def _types(trace: Trace) -> str:
    """What is wrong with the types of a completion's arrays: a value of another type may pass for one."""
    if trace.tokens.ndim != 1 or trace.tokens.dtype.kind not in "iu":
        return f"its tokens are {trace.tokens.dtype} in {trace.tokens.ndim} dimensions, not a row of integers"
    logprobs = trace.logprobs
    if logprobs is not None and (logprobs.ndim != 1 or logprobs.dtype != np.float32):
        return (
            f"its log-probabilities are {logprobs.dtype} in {logprobs.ndim} dimensions, not a row of float32"
        )
    return ""


def _trace(unit: RolloutUnit, row: int, trace: Trace, expected: AskedUnit) -> str:
    if why := _types(trace):
        return why
    if trace.row != row:
        return f"it is of row {trace.row}, not of {row}"
    if trace.segments != ((trace.shared, unit.version),):
        return f"its versions by first token are {trace.segments}, not {unit.version} for all of it"
    ids, count = expected.row(unit.split, row)
    if not np.array_equal(trace.prompt, ids):
        return f"its prompt has other tokens ({len(trace.prompt)}) than the row's ({len(ids)})"
    images = tuple((ref.row, ref.number) for ref in trace.images)
    if images != tuple((row, number) for number in range(count)):
        return "its images are not those of the row"
    if not np.array_equal(trace.learned, np.arange(trace.shared, len(trace.tokens))):
        return "what is learned is not the whole completion"
    return _completion(unit, trace, expected) or _logprobs(trace)


def _completion(unit: RolloutUnit, trace: Trace, expected: AskedUnit) -> str:
    tokens = trace.completion
    if not len(tokens):
        return "it is empty"
    if len(tokens) > unit.max_tokens:
        return f"it has {len(tokens)} tokens, and {unit.max_tokens} were allowed"
    if tokens.min() < 0 or tokens.max() >= expected.vocabulary:
        return f"it has a token outside the vocabulary of {expected.vocabulary}"
    sampled = set(tokens.tolist())
    if banned := sampled & set(expected.banned):
        return f"it has token {min(banned)}, which is never sampled"
    ends = set(expected.ends)
    if early := ends & set(tokens[:-1].tolist()):
        return f"it goes on behind the end token {min(early)}"
    ended = int(tokens[-1]) in ends
    match trace.end:
        case "stop":
            return "" if ended else f"it is said to have stopped, and ends on token {tokens[-1]}"
        case "length" if ended:
            return "it is said to be cut, and ends on an end token"
        case "length":
            short = len(tokens) < unit.max_tokens
            return f"it is said to be cut, after {len(tokens)} of {unit.max_tokens} tokens" if short else ""
    return f"it ended by {trace.end!r}, which no completion here does"


def _logprobs(trace: Trace) -> str:
    logprobs = trace.logprobs
    if logprobs is None:
        return "it has no log-probabilities"
    if len(logprobs) != len(trace.completion):
        return f"it has {len(logprobs)} log-probabilities for {len(trace.completion)} tokens"
    if not np.isfinite(logprobs).all():
        return NOT_FINITE
    highest, lowest = float(logprobs.max()), float(logprobs.min())
    if highest > ROUNDING:
        return f"a log-probability is {highest:.3g}, above 0"
    if lowest < LEAST_LOGPROB:
        return f"a log-probability is {lowest:.3g}, which no sampled token has"
    return ""


MOST_AT_ONCE = 16
"""Units whose samples are in memory at a time, before they are checked."""


@dataclass(frozen=True)
class SentUnit:
    """A unit whose samples a worker says to have sent."""

    worker: str
    given: GivenUnit
    key: str
    unit: RolloutUnit | None
    """What it was asked; None where nobody wants its samples any more, which are then not read."""
    is_probe: bool = False


class RefusedSamples(ValueError):
    """Why what a worker wrote may not train."""


Received = list[Trace] | RefusedSamples | ForgedObject | FileNotFoundError | None
"""Samples; or why they may not train; or why what lies there is not what the worker wrote; or nothing, where
they were not read."""


class SampleIntake:
    """Reads every unit that workers have sent once."""

    def __init__(self, objects: Objects, expected: AskedUnit, pool: Executor) -> None:
        self._objects, self._expected = objects, expected
        self._pool = pool
        self._units_read: set[tuple[str, GivenUnit]] = set()
        """(worker, the unit as it was assigned to it)"""

    def unread(self, worker: str, sent: Iterable[GivenUnit]) -> list[GivenUnit]:
        return [given for given in sent if (worker, given) not in self._units_read]

    def mark_read(self, sent: SentUnit) -> None:
        self._units_read.add((sent.worker, sent.given))

    def read(self, sent: Sequence[SentUnit]) -> Iterator[tuple[SentUnit, Received]]:
        """Reads and checks samples, in the order of `sent`. Raises StorageError."""
        for start in range(0, len(sent), MOST_AT_ONCE):
            batch = sent[start : start + MOST_AT_ONCE]
            # a row's prompt is made into tokens by this thread alone
            limits = [self._expected.most_bytes(unit.unit) if unit.unit else 0 for unit in batch]
            for unit, body in zip(batch, self._pool.map(self._fetch, batch, limits), strict=True):
                yield unit, check_samples(unit, body, self._expected) if isinstance(body, bytes) else body

    def _fetch(self, sent: SentUnit, most_bytes: int) -> bytes | ForgedObject | FileNotFoundError | None:
        try:
            return self._objects.get(sent.key, most_bytes) if sent.unit else None
        except (ForgedObject, FileNotFoundError) as error:
            return error


def check_samples(sent: SentUnit, body: bytes, expected: AskedUnit) -> list[Trace] | RefusedSamples:
    assert sent.unit is not None
    try:
        about, traces = unpack_samples(body)
        why = samples_refusal(sent.unit, (sent.given.turn, sent.worker), about, traces, expected)
    except UNREADABLE as error:
        why = f"it cannot be read: {error}"
    return RefusedSamples(why) if why else traces
