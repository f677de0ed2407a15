"""Writing prepared datasets: Parquet shards with the images inside, and a manifest that is written last.

The columns carry the Hugging Face feature types, so that `datasets.load_dataset("parquet", ...)` gives
decoded images and messages as structures. Pages are uncompressed (images are compressed already) and
row groups small, so that one row costs one short read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.dataset import MANIFEST
from trainer.data.schema import COLUMNS, Manifest, Row, count_placeholders

_STRING = {"dtype": "string", "_type": "Value"}
_FEATURES: dict[str, Any] = dict.fromkeys(COLUMNS, _STRING) | {
    "messages": [{"role": _STRING, "content": [{"type": _STRING, "text": _STRING}]}],
    "images": [{"_type": "Image"}],
}
_PART = pa.struct([("type", pa.string()), ("text", pa.string())])
_TYPES: dict[str, pa.DataType] = {
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(_PART))])),
    "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
}
SCHEMA = pa.schema(
    [(name, _TYPES.get(name, pa.string())) for name in COLUMNS],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)
SHARD_BYTES = 256 << 20
"""Size of a shard, which ends after the row group that exceeds it."""
GROUP_BYTES = 4 << 20
GROUP_ROWS = 64
"""A row group is closed at whichever comes first: it is the unit of a random read, and of the writer's
memory."""


class _HashedFile(io.FileIO):
    """A new file that hashes what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        done = 0
        while done < len(view):
            done += super().write(view[done:])
        return done

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
        super().close()


class SplitWriter:
    """Writes the rows of one split into shards, holding one row group in memory.

    Files carry a `.part` suffix until `close`, which knows their number and gives them their final names.
    """

    def __init__(self, out_dir: Path, split: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._dir = out_dir
        self._split = split
        self._shard_bytes = shard_bytes
        self._buffer: list[Row] = []
        self._buffered = 0
        self.images_per_row = 0
        """Most images of any row so far."""
        self._open: tuple[pq.ParquetWriter, _HashedFile] | None = None
        self._shards: list[dict[str, Any]] = []

    def add(self, row: Row) -> None:
        self._buffer.append(row)
        self._buffered += sum(map(len, row.images))
        self.images_per_row = max(self.images_per_row, len(row.images))
        if self._buffered >= GROUP_BYTES or len(self._buffer) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        writer, file = self._open = self._open or self._new_shard()
        table = pa.Table.from_pylist([_record(row) for row in self._buffer], schema=SCHEMA)
        writer.write_table(table, row_group_size=len(self._buffer))
        self._shards[-1]["rows"] += len(self._buffer)
        self._buffer = []
        self._buffered = 0
        if file.tell() >= self._shard_bytes:
            self._finish_shard()

    def _new_shard(self) -> tuple[pq.ParquetWriter, _HashedFile]:
        path = self._dir / f".{self._split}-{len(self._shards):05d}.part"
        file = _HashedFile(path)
        self._shards.append({"part": path, "rows": 0})
        repeated = ["source", "answer_type", "reading"]
        writer = pq.ParquetWriter(
            file, SCHEMA, compression="none", use_dictionary=repeated, write_statistics=False
        )
        return writer, file

    def _finish_shard(self) -> None:
        if self._open is None:
            return
        writer, file = self._open
        writer.close()
        self._shards[-1] |= {"bytes": file.tell(), "sha256": file.sha256.hexdigest()}
        file.close()
        self._open = None

    def close(self) -> list[dict[str, Any]]:
        """Finishes the last shard, names the files, and returns their manifest entries."""
        self._flush()
        self._finish_shard()
        files = []
        for number, shard in enumerate(self._shards):
            name = f"{self._split}-{number:05d}-of-{len(self._shards):05d}.parquet"
            shard.pop("part").replace(self._dir / name)
            files.append({"path": name, "split": self._split, **shard})
        return files


def _record(row: Row) -> dict[str, Any]:
    """A row as the schema has it: content always a list of parts, images as `datasets` stores them."""
    messages = []
    for message in row.messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages.append({"role": message["role"], "content": parts})
    record: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
    record["messages"] = messages
    record["images"] = [{"bytes": image, "path": None} for image in row.images]
    record["extra"] = json.dumps(row.extra, ensure_ascii=False, sort_keys=True) if row.extra else ""
    return record


def fingerprint(files: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """sha256 over the shards' hashes and the settings: equal content and settings, equal fingerprint."""
    text = json.dumps([[(f["path"], f["sha256"]) for f in files], settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(out_dir: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically: with it the directory becomes a dataset."""
    part = out_dir / f".{MANIFEST}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(manifest), file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    part.replace(out_dir / MANIFEST)


OWN_FILES = ("*-[0-9][0-9][0-9][0-9][0-9]-of-*.parquet", ".*.part", "quarantine.jsonl", "preview.html")
"""Files of a dataset besides its manifest."""


def clear(out_dir: Path) -> None:
    """Removes a former dataset from `out_dir`, the manifest first."""
    (out_dir / MANIFEST).unlink(missing_ok=True)
    for pattern in OWN_FILES:
        for path in out_dir.glob(pattern):
            path.unlink()


def others_in(out_dir: Path) -> list[str]:
    """Names of what lies in `out_dir` and was not left by a preparation, hidden files aside."""
    names = []
    for path in sorted(out_dir.iterdir()) if out_dir.is_dir() else ():
        own = path.name.startswith(".") or any(path.match(pattern) for pattern in OWN_FILES)
        if not own:
            names.append(path.name)
    return names


def write_dataset(
    out_dir: str | Path,
    name: str,
    rows_by_split: dict[str, Iterable[Row]],
    settings: dict[str, Any],
    revision: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Writes one prepared dataset, streaming: split after split, the manifest last. Replaces a former one.

    Raises ValueError for a row whose placeholders and images differ in number.
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
    if count_placeholders(row.messages) != len(row.images):
        raise ValueError(
            f"row {row.id}: {count_placeholders(row.messages)} image placeholders, {len(row.images)} images"
        )
