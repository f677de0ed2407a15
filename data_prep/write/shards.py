"""Prepared datasets on disk: Parquet shards with the pictures inside, and a manifest that is written last.

Pages are uncompressed (pictures are compressed already) and row groups small, so that one row costs one short read.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.write.shard_file import ShardFile
from trainer.config import ConfigError
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
MANIFEST = "manifest.json"


class SplitWriter:
    """Writes the rows of one split into shards, in a thread of its own, holding two row groups in memory.

    Files carry a `.part` suffix until `close`, which knows their number and gives them their final names.
    """

    def __init__(self, out_dir: Path, split: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._dir, self._split, self._shard_bytes = out_dir, split, shard_bytes
        self._buffer: list[Row] = []
        self._buffered = 0
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
    for split, rows in rows_by_split.items():
        writer = SplitWriter(out, split, shard_bytes)
        counts[split] = 0
        for row in rows:
            check_row(row)
            writer.add(row)
            counts[split] += 1
        files += writer.close()
    manifest = Manifest(
        name=name,
        revision=revision,
        rows=counts,
        files=files,
        settings=settings,
        fingerprint=fingerprint(files, settings),
    )
    write_manifest(out, manifest)
    return manifest


def check_row(row: Row) -> None:
    """Raises ValueError where a row breaks the format."""
    if placeholders(row.messages) != len(row.images):
        raise ValueError(f"row {row.id}: {placeholders(row.messages)} image placeholders, {len(row.images)} pictures")


def read_manifest(path: str | Path) -> Manifest:
    """Manifest of a prepared dataset in a local directory or at an object-store URL. ConfigError if there is none."""
    text = str(path)
    try:
        if "://" in text:
            from trainer.storage.storage import Storage

            raw: bytes | str = Storage(text).get_bytes(MANIFEST)
        else:
            raw = (Path(text) / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"no prepared dataset at {text} (no {MANIFEST}): run `python launch.py data prepare NAME --out {text}`"
        ) from None
    try:
        data = json.loads(raw)
        known = {f.name for f in dataclasses.fields(Manifest)}
        return Manifest(**{key: value for key, value in data.items() if key in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{text}/{MANIFEST} is damaged ({error}): prepare the dataset again") from None


def sha256_of(path: str | Path) -> str:
    """sha256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Dataset:
    """One split of a prepared dataset: `len(d)`, `d[i] -> Row`, iteration. Opens nothing until a row is read.

    At a URL, whole shards are fetched on first use into `cache_dir` (default `~/.cache/spotrl/data`), checked against
    the manifest's sha256, and shared by all processes of the node. Raises ConfigError if there is no manifest, the
    split is unknown, or a shard is missing or of another size than the manifest says.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        cache_dir: str | Path | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.path, self.split = str(path), split
        self.manifest = manifest or read_manifest(path)
        self.fingerprint = self.manifest.fingerprint
        if split not in self.manifest.rows:
            raise ConfigError(f"no split {split!r} in {path}: it has {', '.join(self.manifest.rows) or 'no splits'}")
        self._files = [f for f in self.manifest.files if f["split"] == split]
        self._starts = [0]
        for file in self._files:
            self._starts.append(self._starts[-1] + file["rows"])
        cache = Path(cache_dir or os.environ.get("SPOTRL_CACHE", "~/.cache/spotrl/data")).expanduser()
        self._dir = cache / self.fingerprint[:16] if "://" in self.path else Path(self.path)
        if "://" not in self.path:
            for file in self._files:
                self._check_size(file)
        self._open_files()

    def _open_files(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[int, tuple[pq.ParquetFile, list[int]]] = {}
        self._cached: tuple[tuple[int, int], pa.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_readers", "_cached")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._starts, index) - 1
        with self._lock:
            _, groups = self._reader(shard)
            local = index - self._starts[shard]
            group = bisect.bisect_right(groups, local) - 1
            return _row(self._group(shard, group), local - groups[group])

    def __iter__(self) -> Iterator[Row]:
        """Streams the rows in order, one row group in memory."""
        for shard in range(len(self._files)):
            with self._lock:
                groups = len(self._reader(shard)[1]) - 1
            for group in range(groups):
                with self._lock:
                    table = self._group(shard, group)
                for i in range(table.num_rows):
                    yield _row(table, i)

    def column(self, name: str) -> list[Any]:
        """All values of one column, without reading the others (`images` would hold every picture in memory)."""
        with self._lock:
            readers = [self._reader(shard)[0] for shard in range(len(self._files))]
            return [value for reader in readers for value in reader.read(columns=[name]).column(0).to_pylist()]

    def verify(self) -> None:
        """Reads every shard and compares its sha256 with the manifest. Raises ConfigError naming the bad shard."""
        for file in self._files:
            if "://" in self.path:
                self._fetch(file)
            if sha256_of(self._dir / file["path"]) != file["sha256"]:
                raise ConfigError(f"{self._dir / file['path']} is damaged (sha256 differs): prepare or fetch it again")

    def _reader(self, shard: int) -> tuple[pq.ParquetFile, list[int]]:
        if shard not in self._readers:
            file = self._files[shard]
            if "://" in self.path:
                self._fetch(file)
            reader = pq.ParquetFile(self._dir / file["path"], memory_map=True)
            starts = [0]
            for group in range(reader.num_row_groups):
                starts.append(starts[-1] + reader.metadata.row_group(group).num_rows)
            self._readers[shard] = reader, starts
        return self._readers[shard]

    def _group(self, shard: int, group: int) -> pa.Table:
        if self._cached is None or self._cached[0] != (shard, group):
            self._cached = (shard, group), self._reader(shard)[0].read_row_group(group)
        return self._cached[1]

    def _check_size(self, file: dict[str, Any]) -> None:
        path = self._dir / file["path"]
        size = path.stat().st_size if path.exists() else -1
        if size != file["bytes"]:
            found = "missing" if size < 0 else f"{size} bytes, the manifest says {file['bytes']}"
            raise ConfigError(f"shard {path} is {found}: prepare the dataset again")

    def _fetch(self, file: dict[str, Any]) -> None:
        from trainer.storage.storage import Storage

        path = self._dir / file["path"]
        if path.exists():
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        with open(self._dir / f".{file['path']}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the node fetches, the others wait
            if path.exists():
                return
            part = self._dir / f".{file['path']}.part"
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            Storage(self.path).get(file["path"], part)
            if sha256_of(part) != file["sha256"]:
                part.unlink()
                raise ConfigError(f"{self.path}/{file['path']} differs from its manifest (sha256): upload it again")
            part.replace(path)


def _row(table: pa.Table, i: int) -> Row:
    values = {name: table.column(name)[i].as_py() for name in COLUMNS}
    return Row(**values | {"messages": json.loads(values["messages"])})
