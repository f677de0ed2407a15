"""Units of work: whole groups of one step, which a worker samples in one go and sends in one object."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint.trace_columns import text_array, trace_columns, traces_of
from trainer.system.records import Count, Line, Name, decode_record

UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
"""What reading an archive raises that is not whole, is none, or holds something else than samples."""


Lineage = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{0,64}\Z")]
"""What weights are, by content."""
AtLeastOne = Annotated[int, Meta(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class RolloutUnit:
    """Some groups of one step, and all that their samples depend on. Workers read it with these types."""

    name: Name
    """Tells it from every other unit of the attempt."""
    step: Count
    version: Count
    """Version of the weights that sample it."""
    lineage: Lineage
    split: Literal["train", "evaluation"]
    """Where the prompts' rows stand."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: AtLeastOne
    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    max_tokens: AtLeastOne

    @property
    def cost(self) -> float:
        """Completions that it asks for."""
        return float(len(self.prompts) * self.samples_per_prompt)


class SamplesAbout(Struct, frozen=True):
    """What an archive of samples says of itself."""

    unit: dict[str, Any]
    """The unit as the worker was given it, which is compared field by field with what was asked."""
    turn: Count
    worker: Line


@dataclass(frozen=True)
class SampledUnit:
    """What a worker sends of a unit."""

    unit: dict[str, Any]
    """The unit as the worker was given it."""
    turn: int
    """How often the unit had been given out when this worker got it."""
    worker: str
    traces: list[Trace]
    """The completions without their text, which the head decodes from the tokens."""


def pack_samples(unit: RolloutUnit, turn: int, worker: str, traces: Sequence[Trace]) -> bytes:
    """A unit's samples as one NumPy archive without pickles."""
    about = msgspec.to_builtins(SamplesAbout(msgspec.to_builtins(unit), turn, worker))
    out = io.BytesIO()
    arrays = {"about": text_array(about)} | trace_columns(traces)
    np.savez(out, **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


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


def unpack_samples(body: bytes) -> SampledUnit:
    """The inverse of `pack_samples`. Raises one of UNREADABLE."""
    check_archive(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        arrays = dict(archive)
    about = decode_record(arrays["about"].tobytes(), SamplesAbout, "about")
    traces = traces_of(arrays, [""] * len(arrays["group"]))
    return SampledUnit(about.unit, about.turn, about.worker, traces)
