"""Units of work: whole groups of one step, which a worker samples in one go and sends in one object."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint.trace_columns import text_array, trace_columns, traces_of

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


@dataclass(frozen=True)
class RolloutUnit:
    """Some groups of one step, and all that their samples depend on."""

    name: str
    """Tells it from every other unit of the attempt."""
    step: int
    version: int
    """Version of the weights that sample it."""
    lineage: str
    """What these weights are, by content."""
    split: Literal["train", "evaluation"]
    """Where the prompts' rows stand."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    temperature: float
    top_p: float
    max_tokens: int
    with_routes: bool = False
    """Whether its samples have the experts that the engine chose, which the policy is to use."""

    @property
    def cost(self) -> float:
        """Completions that it asks for."""
        return float(len(self.prompts) * self.samples_per_prompt)

    def to_json(self) -> dict[str, Any]:
        """The unit as a worker's mail holds it."""
        prompts = [[prompt.group, prompt.row, prompt.seed] for prompt in self.prompts]
        return asdict(self) | {"prompts": prompts}

    @classmethod
    def read(cls, value: dict[str, Any]) -> RolloutUnit:
        """The inverse of `to_json`. Raises TypeError for another record."""
        fields: dict[str, Any] = value | {"prompts": tuple(Prompt(*prompt) for prompt in value["prompts"])}
        return cls(**fields)


@dataclass(frozen=True)
class SampledUnit:
    """What a worker sends of a unit."""

    unit: dict[str, Any]
    """The unit as the worker was given it."""
    turn: int
    """How often the unit had been given out when this worker got it."""
    worker: str
    traces: list[Trace]
    """Without their text, which the head decodes from the tokens."""


def pack_samples(unit: RolloutUnit, turn: int, worker: str, traces: Sequence[Trace]) -> bytes:
    """A unit's samples as one NumPy archive without pickles."""
    about = {"unit": unit.to_json(), "turn": turn, "worker": worker}
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
    about = json.loads(arrays["about"].tobytes())
    traces = traces_of(arrays, [""] * len(arrays["group"]))
    return SampledUnit(about["unit"], about["turn"], about["worker"], traces)
