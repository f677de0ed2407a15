"""The checkpoint's format, and writing its files.

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.manifest import CheckpointError, FileRecord, rank_stem
from trainer.checkpoint.ranged_shard import BLOCK_BYTES, DTYPES, BlockSums

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
