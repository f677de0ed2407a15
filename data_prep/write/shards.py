"""Prepared datasets on disk: Parquet shards with the pictures inside, and a manifest that is written last.

Pages are uncompressed (pictures are compressed already) and row groups small, so that one row costs one short read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.write.shard_file import ShardFile
from trainer.data.dataset import MANIFEST
from trainer.data.schema import COLUMNS, Manifest, Row, placeholders

SCHEMA = pa.schema(
    [(name, pa.list_(pa.binary()) if name == "images" else pa.string()) for name in COLUMNS],
    metadata={"spotrl.format": "1"},
)
SHARD_BYTES = 256 << 20
"""A shard is closed after the row group that takes it past this size."""
GROUP_BYTES = 4 << 20
GROUP_ROWS = 64
"""A row group is closed at whichever comes first: it is the unit of a random read, and of the writer's memory."""


class SplitWriter:
    """Writes the rows of one split into shards, in a thread of its own, holding two row groups in memory.

    Files carry a `.part` suffix until `close`, which knows their number and gives them their final names.
    """

    def __init__(self, out_dir: Path, split: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._dir, self._split, self._shard_bytes = out_dir, split, shard_bytes
        self._buffer: list[Row] = []
        self._buffered = 0
        self.images_per_row = 0
        """Most images of any row so far."""
        self._writer: pq.ParquetWriter | None = None
        self._file: ShardFile | None = None
        self._shards: list[dict[str, Any]] = []
        self._room = np.empty(2 * GROUP_BYTES, dtype=np.uint8)
        self._thread = ThreadPoolExecutor(1)
        self._written: Future | None = None

    def add(self, row: Row) -> None:
        """Appends one row."""
        self._buffer.append(row)
        self._buffered += sum(map(len, row.images))
        self.images_per_row = max(self.images_per_row, len(row.images))
        if self._buffered >= GROUP_BYTES or len(self._buffer) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._written is not None:
            self._written.result()
        if self._buffer:
            self._written = self._thread.submit(self._write, self._buffer)
        self._buffer, self._buffered = [], 0

    def _write(self, rows: list[Row]) -> None:
        if self._writer is None:
            path = self._dir / f".{self._split}-{len(self._shards):05d}.part"
            self._file = ShardFile(path)
            self._writer = pq.ParquetWriter(
                self._file, SCHEMA, compression="none", use_dictionary=["source", "answer_type"], write_statistics=False
            )
            self._shards.append({"part": path, "rows": 0})
        arrays = [self._images(rows) if name == "images" else _texts(name, rows) for name in COLUMNS]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), row_group_size=len(rows))
        self._shards[-1]["rows"] += len(rows)
        if self._file is not None and self._file.tell() >= self._shard_bytes:
            self._finish_shard()

    def _images(self, rows: list[Row]) -> pa.Array:
        """The pictures as one column, in room that is used again and again: fresh memory costs more than the copy."""
        pictures = [picture for row in rows for picture in row.images]
        ends = np.cumsum([0, *map(len, pictures)])
        if ends[-1] > len(self._room):
            self._room = np.empty(ends[-1], dtype=np.uint8)
        for start, picture in zip(ends.tolist(), pictures, strict=False):
            self._room[start : start + len(picture)] = np.frombuffer(picture, dtype=np.uint8)
        values = _from_buffers(pa.binary(), ends, pa.py_buffer(self._room[: ends[-1]]))
        rows_end = np.cumsum([0, *(len(row.images) for row in rows)])
        return _from_buffers(pa.list_(pa.binary()), rows_end, children=[values])

    def _finish_shard(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._shards[-1] |= {"bytes": self._file.tell(), "file": self._file}
        self._file.close()
        self._writer = self._file = None

    def close(self) -> list[dict[str, Any]]:
        """Finishes the last shard, names the files, and returns their manifest entries."""
        self._flush()
        if self._written is not None:
            self._written.result()
        self._thread.shutdown()
        self._finish_shard()
        files = []
        for number, shard in enumerate(self._shards):
            name = f"{self._split}-{number:05d}-of-{len(self._shards):05d}.parquet"
            sha256 = shard["file"].hexdigest()
            shard["part"].replace(self._dir / name)
            entry = {"path": name, "split": self._split, "rows": shard["rows"], "bytes": shard["bytes"]}
            files.append(entry | {"sha256": sha256})
        return files


def _texts(name: str, rows: list[Row]) -> pa.Array:
    """One of the columns of text."""
    values = [getattr(row, name) for row in rows]
    if name == "messages":
        values = [json.dumps(messages, ensure_ascii=False) for messages in values]
    encoded = [value.encode() for value in values]
    return _from_buffers(pa.string(), np.cumsum([0, *map(len, encoded)]), pa.py_buffer(b"".join(encoded)))


def _from_buffers(kind: pa.DataType, ends: np.ndarray, *content: pa.Buffer, children: list | None = None) -> pa.Array:
    """An array of texts, bytes or lists. (`pa.array` would first import pandas where there is one: 0.8 s.)"""
    return pa.Array.from_buffers(
        kind, len(ends) - 1, [None, pa.py_buffer(ends.astype(np.int32)), *content], children=children
    )


def fingerprint(files: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """sha256 over the shards' hashes and the settings: equal content and settings, equal fingerprint."""
    text = json.dumps([[(f["path"], f["sha256"]) for f in files], settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(out_dir: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically: with it the directory becomes a dataset."""
    part = out_dir / f".{MANIFEST}.part"
    with open(part, "w") as file:
        json.dump(dataclasses.asdict(manifest), file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    part.replace(out_dir / MANIFEST)


def clear(out_dir: Path) -> None:
    """Removes a former dataset from `out_dir`, the manifest first."""
    (out_dir / MANIFEST).unlink(missing_ok=True)
    for pattern in ("*-[0-9][0-9][0-9][0-9][0-9]-of-*.parquet", ".*.part", "quarantine.jsonl", "preview.html"):
        for path in out_dir.glob(pattern):
            path.unlink()


def write_dataset(
    out_dir: str | Path,
    name: str,
    rows_by_split: dict[str, Iterable[Row]],
    settings: dict[str, Any],
    revision: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Writes one prepared dataset, streaming: split after split, the manifest last. Replaces a former one.

    Raises ValueError for a row whose placeholders and pictures differ in number.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    clear(out)
    files: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    images_per_row: dict[str, int] = {}
    for split, rows in rows_by_split.items():
        writer = SplitWriter(out, split, shard_bytes)
        counts[split] = 0
        for row in rows:
            check_row(row)
            writer.add(row)
            counts[split] += 1
        files += writer.close()
        images_per_row[split] = writer.images_per_row
    manifest = Manifest(
        name=name,
        revision=revision,
        rows=counts,
        files=files,
        images_per_row=images_per_row,
        settings=settings,
        fingerprint=fingerprint(files, settings),
    )
    write_manifest(out, manifest)
    return manifest


def check_row(row: Row) -> None:
    """Raises ValueError where a row breaks the format."""
    if placeholders(row.messages) != len(row.images):
        raise ValueError(f"row {row.id}: {placeholders(row.messages)} image placeholders, {len(row.images)} pictures")
