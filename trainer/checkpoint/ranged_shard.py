"""Parts of a shard file straight from the store: every block that is read has a checksum of its own.

A rank of another number of ranks needs slices of many files, and a worker the weights alone; the sha256 of a
file could only be compared after reading it whole. So the index of each rank's files lists the sha256 of
every `BLOCK_BYTES` of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from concurrent.futures import Future
from typing import Any

import torch

from trainer.checkpoint.manifest import CorruptCheckpoint
from trainer.storage.storage import Storage

BLOCK_BYTES = 1 << 20
KEPT_BLOCKS = 16
"""Blocks of a file that a reader keeps: those at the edges of what it has read hold the beginning of what
follows."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names."""
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class BlockSums:
    """sha256 of every block of a file that is being written."""

    def __init__(self) -> None:
        self._hashes: list[Any] = []
        self._at = 0

    def add(self, data: memoryview) -> None:
        """The file's next bytes."""
        while len(data):
            if self._at == 0:
                self._hashes.append(hashlib.sha256())
            part = data[: BLOCK_BYTES - self._at]
            self._hashes[-1].update(part)
            self._at = (self._at + len(part)) % BLOCK_BYTES
            data = data[len(part) :]

    def packed(self) -> str:
        """The sums as text: 32 bytes each, in base64."""
        return base64.b64encode(b"".join(block.digest() for block in self._hashes)).decode()


class RangedShard:
    """One safetensors file of the store. May be read by several threads. Raises CorruptCheckpoint,
    StorageError."""

    def __init__(self, storage: Storage, name: str, size: int, sums: str):
        """sums: as `BlockSums.packed` gave them."""
        self.storage = storage
        self.name, self.size = name, size
        self._blocks: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        try:
            packed = base64.b64decode(sums, validate=True)
            self._sums = [packed[at : at + 32] for at in range(0, len(packed), 32)]
            if len(self._sums) != -(-size // BLOCK_BYTES):
                raise ValueError(f"{size} bytes and checksums of {len(self._sums)} blocks")
            length = int.from_bytes(self.span(0, 8), "little")
            self._header: dict[str, Any] = json.loads(self.span(8, 8 + length))
        except ValueError as error:
            raise CorruptCheckpoint(f"{name} has no header, or no checksums: {error}") from error
        self._data = 8 + length

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flat tensor. Raises KeyError for an unknown one."""
        entry = self._header[key]
        dtype = _OF_NAME[entry["dtype"]]
        low, high = entry["data_offsets"]
        first = self._data + low + start * dtype.itemsize
        last = self._data + low + stop * dtype.itemsize
        if last > self._data + high:
            raise CorruptCheckpoint(f"{self.name}: {key} ends before element {stop}")
        return torch.frombuffer(bytearray(self.span(first, last)), dtype=dtype)

    def span(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), in one request, without the blocks at the edges that another read has or
        fetches."""
        if not 0 <= start < stop <= self.size:
            raise CorruptCheckpoint(f"{self.name} has {self.size} bytes, and [{start}, {stop}) is asked for")
        wanted = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        with self._lock:
            mine = {number: Future() for number in wanted if number not in self._blocks}
            self._blocks |= mine
            blocks = [self._blocks[number] for number in wanted]
        if mine:
            self._fetch(mine)
        whole = b"".join(block.result() for block in blocks)

        with self._lock:
            for number in wanted[1:-1]:
                self._blocks.pop(number, None)
            done = [number for number, block in self._blocks.items() if block.done()]
            for number in done[:-KEPT_BLOCKS]:
                del self._blocks[number]
        return whole[start - wanted[0] * BLOCK_BYTES : stop - wanted[0] * BLOCK_BYTES]

    def _fetch(self, wanted: dict[int, Future[bytes]]) -> None:
        """Fills in blocks, compared with their checksums; asked for once more if one differs."""
        first = min(wanted)
        start, stop = first * BLOCK_BYTES, min((max(wanted) + 1) * BLOCK_BYTES, self.size)
        bad = 0
        try:
            for _ in range(2):
                data = self.storage.get_range(self.name, start, stop)
                blocks = {n: data[(n - first) * BLOCK_BYTES :][:BLOCK_BYTES] for n in wanted}
                damaged = [n for n in wanted if hashlib.sha256(blocks[n]).digest() != self._sums[n]]
                if not damaged:
                    for number, block in blocks.items():
                        wanted[number].set_result(block)
                    return
                bad = damaged[0]
            raise CorruptCheckpoint(
                f"{self.name} in {self.storage.url} is damaged from byte {bad * BLOCK_BYTES} on"
            )
        except BaseException as error:
            wrong = CorruptCheckpoint(str(error)) if isinstance(error, FileNotFoundError) else error
            for block in wanted.values():
                block.set_exception(wrong)
