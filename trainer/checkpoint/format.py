"""The checkpoint's format: writing its files, and reading parts of them from the store.

One checkpoint is one folder `step-00000020`. Every rank writes its own files there and waits for nobody:

    rank-00001-of-00004.safetensors      flat fp32 pieces `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`
    rank-00001-of-00004.1.safetensors    more of them, once a file has reached `FILE_BYTES`
    rank-00001-of-00004.json             which [start, stop) of which flat parameter lies in which file, the
                                         sha256 of every MiB of these, RNG states

The driver adds `state.json` and, last, `manifest.json` (sizes and sha256 of every file, and the attempt that
wrote them): without it there is no checkpoint. In the store every attempt of a run has a folder of its own in
a step's, `step-00000020/7-3f2c1a`, so that no committed object is ever overwritten.

ZeRO-3 cuts every flattened parameter into world_size equal pieces and pads the tail; stages 1 and 2 cut a
whole group of parameters, so that a rank's piece of one may be all of it or nothing. Padding is not stored,
so that the pieces can be read back by any number of ranks, at any stage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import CheckpointError, CorruptCheckpoint, FileRecord, rank_stem
from trainer.storage.storage import Storage

BLOCK_BYTES = 1 << 20
KEPT_BLOCKS = 16
"""Blocks of a file that a reader keeps: those at the edges of what it has read hold the beginning of what
follows."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names."""
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
FILE_BYTES = 4 << 30
"""Largest shard file: a failed upload is repeated from the start of one file, and stores join small files
quickly."""
CHUNK_BYTES = 8 << 20
"""Written and hashed at a time."""


@dataclass(frozen=True)
class Shard:
    """One rank's piece of one parameter: elements [start, stop) of the flattened parameter."""

    shape: tuple[int, ...]
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    """kind ("master", "exp_avg", "exp_avg_sq", ...) -> flat CPU tensor of stop - start elements."""


# --- values that JSON lacks ---------------------------------------------------------------------------------


def encode_state(value: Any) -> Any:
    """JSON data of nested dicts, lists and tuples with numbers, strings, bytes, NumPy arrays and tensors in
    them."""
    match value:
        case torch.Tensor():
            raw = value.detach().cpu().contiguous()
            data = base64.b64encode(raw.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
            return {
                "__tensor__": data,
                "dtype": str(raw.dtype).removeprefix("torch."),
                "shape": list(raw.shape),
            }
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode()}
        case tuple():
            return {"__tuple__": [encode_state(item) for item in value]}
        case list():
            return [encode_state(item) for item in value]
        case dict():
            return {str(key): encode_state(item) for key, item in value.items()}
        case None | bool() | int() | float() | str():
            return value
    if hasattr(value, "__array__"):
        return {"__array__": encode_state(torch.as_tensor(value))}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r}")


def decode_state(value: Any) -> Any:
    match value:
        case {"__tensor__": data, "dtype": dtype, "shape": shape}:
            flat = (
                torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
                if data
                else torch.empty(0)
            )
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case {"__bytes__": data}:
            return base64.b64decode(data)
        case {"__tuple__": items}:
            return tuple(decode_state(item) for item in items)
        case {"__array__": tensor}:
            return decode_state(tensor).numpy()
        case list():
            return [decode_state(item) for item in value]
        case dict():
            return {key: decode_state(item) for key, item in value.items()}
    return value


# --- writing files ------------------------------------------------------------------------------------------


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


def write_file(path: Path, parts: Iterable[Any], sums: BlockSums | None = None) -> tuple[int, str]:
    """Writes buffers to `path` through a temporary file, durably; `sums` gets them too. Returns (bytes,
    sha256)."""
    scratch = path.with_name(f".{path.name}.partial")
    digest = hashlib.sha256()
    count = 0
    try:
        with open(scratch, "wb") as file:
            for part in parts:
                view = memoryview(part).cast("B")
                for at in range(0, len(view), CHUNK_BYTES):
                    piece = view[at : at + CHUNK_BYTES]
                    file.write(piece)
                    digest.update(piece)
                    if sums:
                        sums.add(piece)
                    count += len(piece)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return count, digest.hexdigest()


def safetensors_header(
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """The first bytes of a safetensors file whose tensors follow in the order of `entries`."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in entries.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def write_shards(
    folder: Path, rank: int, world_size: int, step: int, shards: dict[str, Shard], extra: dict[str, Any]
) -> list[FileRecord]:
    """Writes one rank's files and returns their records, the index first. Raises OSError (a full disk, say).
    Tensors go kind by kind, "master" last: of a large model, an export fetches only the files that hold
    weights."""
    stem = rank_stem(rank, world_size)
    files, index = _in_files(shards)
    records = []
    blocks = {}
    for number, tensors in enumerate(files):
        pieces = {}
        entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for key, tensor in tensors.items():
            name = key.partition("/")[2]
            pieces[name] = index[name][:3]
            entries[key] = (tensor.dtype, (tensor.numel(),))
        about = {
            "format": "spotrl-shard-1",
            "step": str(step),
            "rank": str(rank),
            "world_size": str(world_size),
            "index": json.dumps(pieces, separators=(",", ":")),
        }
        header = safetensors_header(entries, about)
        file_name = f"{stem}.{number}.safetensors" if number else f"{stem}.safetensors"
        sums = BlockSums()
        written = write_file(folder / file_name, [header, *map(raw_bytes, tensors.values())], sums)
        records.append(FileRecord(file_name, *written))
        blocks[file_name] = sums.packed()

    sidecar = {
        "step": step,
        "rank": rank,
        "world_size": world_size,
        "files": list(blocks),
        "index": index,
        "block_bytes": BLOCK_BYTES,
        "sha256": blocks,
        "extra": encode_state(extra),
    }
    text = json.dumps(sidecar, separators=(",", ":"))
    return [FileRecord(f"{stem}.json", *write_file(folder / f"{stem}.json", [text.encode()])), *records]


def _in_files(shards: dict[str, Shard]) -> tuple[list[dict[str, torch.Tensor]], dict[str, list[Any]]]:
    """The tensors of each file by their keys in it, and the index of all files. The index has of each
    parameter its shape, the start and stop of the piece, and {kind: number of the file}. Raises
    CheckpointError for a tensor that is not on the CPU, or not as long as its piece."""
    kinds: set[str] = set()
    for shard in shards.values():
        kinds.update(shard.tensors)

    index: dict[str, list[Any]] = {}
    files: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for kind in sorted(kinds):
        for name, shard in shards.items():
            tensor = shard.tensors[kind]
            length = shard.stop - shard.start
            if tensor.numel() != length or tensor.device.type != "cpu":
                where = f"{kind}/{name}: {tensor.numel()} elements on {tensor.device}"
                raise CheckpointError(f"{where}, not {length} on the CPU")
            size = length * tensor.element_size()
            if filled and filled + size > FILE_BYTES:
                files.append({})
                filled = 0
            filled += size
            files[-1][f"{kind}/{name}"] = tensor
            entry = index.setdefault(name, [list(shard.shape), shard.start, shard.stop, {}])
            entry[3][kind] = len(files) - 1
    return files, index


# --- parts of a file straight from the store ----------------------------------------------------------------
# A rank of another number of ranks needs slices of many files, and a worker the weights alone; the sha256 of
# a file could only be compared after reading it whole. So the index lists the sha256 of every `BLOCK_BYTES`.


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
            claimed = {number: Future() for number in wanted if number not in self._blocks}
            self._blocks |= claimed
            blocks = [self._blocks[number] for number in wanted]
        if claimed:
            self._fetch(claimed)
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
