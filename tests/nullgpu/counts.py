"""What processes did on the device: launches, host waits and copies by phase, and collectives by rank.

python -m tests.nullgpu.counts FOLDER     # tables of what was recorded there
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROW = struct.Struct("QQ16s32s192s")
"""`struct row` of device/counters.c."""
ROOT = Path(__file__).parents[2]
KINDS = "launch", "captured", "wait", "copy", "collective"
Key = tuple[str, str, str]
"""(phase, kind, what)"""


# --- in a process on the device


def library() -> ctypes.CDLL:
    """The device of this process."""
    device = ctypes.CDLL(os.environ["NULLGPU"])
    device.nullgpu_count.restype = ctypes.c_ulong
    device.nullgpu_used_bytes.restype = ctypes.c_size_t
    device.nullgpu_peak_bytes.restype = ctypes.c_size_t
    return device


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what this process does in the body; afterwards it is "between"."""
    library().nullgpu_phase(name.encode())
    try:
        yield
    finally:
        library().nullgpu_phase(b"between")


def count(kind: str, name: str = "") -> int:
    """Events of a kind ("launch", "wait", "copy", "collective") in a phase, so far; without a name in all."""
    return library().nullgpu_count(kind.encode(), name.encode())


# --- afterwards


@dataclass(frozen=True)
class Collective:
    """One call. Two ranks of a communicator that differ in anything would hang on a card."""

    operation: str
    elements: int
    type: int
    reduction: int
    root: int


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one process left."""

    process: int
    rank: int | None
    """The run's rank; None of a process that is none."""
    counts: dict[Key, int]
    bytes: dict[Key, int]
    callers: dict[tuple[str, str, str], int]
    """(phase, call that waits, Python frames from the innermost out) -> how often."""
    collectives: dict[str, list[Collective]]
    """By communicator, in order."""
    rank_in: dict[str, int]
    """This process's rank in each communicator."""

    def total(self, kind: str, phase: str) -> int:
        return sum(n for (at, of, _), n in self.counts.items() if of == kind and at == phase)

    def phases(self) -> list[str]:
        return list(dict.fromkeys(at for at, _, _ in self.counts))


def read(folder: Path) -> list[Recorded]:
    """Every process that left counts here, ranks first."""
    found = [_read(path) for path in folder.glob("*.counts")]
    return sorted(found, key=lambda one: (one.rank is None, one.rank, one.process))


def _read(path: Path) -> Recorded:
    counts: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    rank = None
    for number, length, *texts in ROW.iter_unpack(path.read_bytes()):
        if not number:
            continue
        kind, phase, what = (text.partition(b"\0")[0].decode(errors="replace") for text in texts)
        if kind == "rank" and what:
            rank = int(what)
        counts[phase, kind, what] += number
        sizes[phase, kind, what] += length
    collectives: dict[str, list[Collective]] = defaultdict(list)
    rank_in = {}
    for line in _lines(path.with_suffix(".collectives")):
        _, world, _, position, _, operation, *numbers = line.split("\t")
        collectives[world].append(Collective(operation, *map(int, numbers)))
        rank_in[world] = int(position)
    return Recorded(
        process=int(path.stem),
        rank=rank,
        counts=dict(counts),
        bytes=dict(sizes),
        callers=_callers(path, counts),
        collectives=dict(collectives),
        rank_in=rank_in,
    )


def _callers(path: Path, counts: Counter[Key]) -> dict[tuple[str, str, str], int]:
    frames = dict(line.split("\t", 1) for line in _lines(path.with_suffix(".callers")))
    found = {}
    for (phase, kind, what), number in counts.items():
        if kind == "caller":
            call, _, key = what.rpartition(" ")
            found[phase, call, frames[key]] = number
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def differences(recorded: list[Recorded]) -> list[str]:
    """Where the ranks of a communicator did not call the same collectives in the same order; [] where all
    agree."""
    worlds: dict[str, dict[int, list[Collective]]] = defaultdict(dict)
    for one in recorded:
        for world, calls in one.collectives.items():
            worlds[world][one.rank_in[world]] = calls
    wrong = []
    for world, by_rank in worlds.items():
        first, *others = sorted(by_rank)
        for other in others:
            wrong += _differs(world, first, by_rank[first], other, by_rank[other])
    return wrong


def _differs(world: str, one: int, ours: list[Collective], other: int, theirs: list[Collective]) -> list[str]:
    for position, (mine, their) in enumerate(zip(ours, theirs, strict=False)):
        if mine != their:
            return [f"{world}: call {position} is {mine} on rank {one}, {their} on rank {other}"]
    if len(ours) != len(theirs):
        return [f"{world}: rank {one} made {len(ours)} calls, rank {other} {len(theirs)}"]
    return []


def by_phase(one: Recorded) -> dict[str, dict[str, int]]:
    """Launches, host waits, copies and collectives of each phase of a process."""
    found = {}
    for phase in one.phases():
        totals = {kind: one.total(kind, phase) for kind in KINDS}
        found[phase] = {kind: number for kind, number in totals.items() if number}
    return {phase: totals for phase, totals in found.items() if totals}


def waits(one: Recorded, phases: tuple[str, ...], most: int = 6) -> dict[str, dict[str, int]]:
    """Where the host waited most often in each of these phases: the call with its four innermost Python
    frames, and how often. Recorded with NULLGPU_CALLERS=1."""
    found: dict[str, Counter[str]] = {phase: Counter() for phase in phases}
    for (phase, call, where), number in one.callers.items():
        if phase in found:
            frames = [_place(frame) for frame in where.split(" < ")[:4]]
            found[phase][f"{call}: {' < '.join(frames)}"] += number
    return {phase: dict(callers.most_common(most)) for phase, callers in found.items()}


def _place(frame: str) -> str:
    """A frame without the folders of this machine."""
    for root in (f"{ROOT}/", f"{sys.base_prefix}/lib/"):
        frame = frame.removeprefix(root)
    return frame


def table(one: Recorded, most: int = 12) -> str:
    """What a process did, by phase."""
    lines = [f"process {one.process}, rank {one.rank}"]
    for phase, totals in by_phase(one).items():
        parts = [f"{kind} {number}" for kind, number in totals.items()]
        lines.append(f"  {phase}: {', '.join(parts)}")
        called = {key: number for key, number in one.callers.items() if key[0] == phase}
        for (_, call, frames), number in Counter(called).most_common(most):
            lines.append(f"    {number:>6} {call}: {frames}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    recorded = read(Path(arguments[0]))
    for one in recorded:
        print(table(one))
    wrong = differences(recorded)
    print("\n".join(wrong) or "all ranks called the same collectives")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
