"""A small file that says where a rank is, for its node's launcher: the collective it entered last, by two
writes of 80 bytes into shared memory. On a signal the rank writes its Python stacks, even while it hangs in
native code."""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.system.server_waits import FOLDER_VARIABLE

SIGNAL = signal.SIGUSR2
RECORD = struct.Struct("!Q?dd48s")
PIECES = struct.Struct("!Q")
"""Behind the record: pieces of work done, such as a step of the engine or a pass."""
SIZE = RECORD.size + PIECES.size
COLLECTIVES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "barrier",
)  # fmt: skip


@dataclass(frozen=True)
class Beacon:
    """What one rank wrote last."""

    rank: int
    pid: int
    calls: int
    """Collectives entered so far."""
    inside: bool
    """Whether the rank is still in the last one."""
    since_s: float
    """Seconds since it entered or left the last one."""
    waited_s: float
    """Seconds spent in collectives so far."""
    name: str
    """The last collective; "" before the first."""
    pieces: int = 0
    """Pieces of work done so far."""


def start_beacon(rank: int) -> None:
    """Starts the beacon of a rank's process, before anything binds torch.distributed's functions."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    stem = Path(folder) / f"rank-{rank}-{os.getpid()}"
    _answer(stem.with_suffix(".stacks"))
    path = stem.with_suffix(".beacon")
    path.write_bytes(RECORD.pack(0, False, time.time(), 0.0, b"") + PIECES.pack(0))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), SIZE)
    _done[:] = [memory, 0]
    import torch.distributed as dist

    state = [0, 0.0]
    for name in COLLECTIVES:
        # Not every version of torch has all of them.
        if hasattr(dist, name):
            setattr(dist, name, _recorded(getattr(dist, name), name.encode(), memory, state))


_done: list[Any] = [None, 0]
"""This process's memory, once `start` was called, and count of pieces."""


def count_piece() -> None:
    """Counts a piece of work, so that the watchdog does not take a long phase for a hang."""
    _done[1] += 1
    if _done[0] is not None:
        PIECES.pack_into(_done[0], RECORD.size, _done[1])


def pieces_done() -> int:
    """Pieces of work that this process has done."""
    return _done[1]


def start_driver() -> None:
    """Lets the driver's process, which is in no collective, write its stacks on the signal."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        _answer(Path(folder) / f"driver-{os.getpid()}.stacks")


def _answer(stacks: Path) -> None:
    faulthandler.register(SIGNAL, file=stacks.open("w"), all_threads=True)


def _recorded(
    function: Callable[..., Any], name: bytes, memory: mmap.mmap, state: list[Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        state[0] += 1
        RECORD.pack_into(memory, 0, state[0], True, began, state[1], name)
        result = function(*args, **kwargs)
        ended = time.time()
        state[1] += ended - began
        RECORD.pack_into(memory, 0, state[0], False, ended, state[1], name)
        return result

    return recorded


def read_beacons(folder: Path) -> list[Beacon]:
    """The beacons of this node's ranks, in order; the newest one of a rank that was started again."""
    beacons: dict[int, Beacon] = {}
    for path in sorted(folder.glob("rank-*.beacon"), key=lambda p: p.stat().st_ctime):
        rank, pid = map(int, path.stem.split("-")[1:])
        data = path.read_bytes()
        if len(data) != SIZE:
            continue
        calls, inside, changed_unix_s, waited_s, name = RECORD.unpack_from(data)
        (pieces,) = PIECES.unpack_from(data, RECORD.size)
        since_s = max(0.0, time.time() - changed_unix_s)
        words = name.rstrip(b"\0").decode()
        beacons[rank] = Beacon(rank, pid, calls, inside, since_s, waited_s, words, pieces)
    return [beacons[rank] for rank in sorted(beacons)]
