"""Reads a prepared dataset: Parquet shards that hold the images, in a directory or at an object-store URL."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.config import ConfigError
from trainer.data.prompts import PromptWording
from trainer.data.schema import COLUMNS, FORMAT, LEARNED, SPLIT_NAME, Manifest, Row

MANIFEST = "manifest.json"
AS_STORED = PromptWording()


def cache_folder() -> Path:
    """Folder of this node for what can be fetched or computed again: SPOTRL_CACHE, else
    `~/.cache/spotrl/data`."""
    return Path(os.environ.get("SPOTRL_CACHE") or "~/.cache/spotrl/data").expanduser()


def read_manifest(path: str | Path) -> Manifest:
    """Manifest of a prepared dataset in a local directory or at an object-store URL. Raises ConfigError if
    there is none."""
    text = str(path)
    try:
        if "://" in text:
            from trainer.storage.storage import Storage

            raw: bytes | str = Storage(text).get_bytes(MANIFEST)
        else:
            raw = (Path(text) / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"no prepared dataset at {text} (no {MANIFEST}): "
            f"run `python3 launch.py data prepare NAME --out {text}`"
        ) from None
    try:
        data = json.loads(raw)
        if data["format"] != FORMAT:
            raise ConfigError(
                f"{text} is of format {data['format']}, this version reads {FORMAT}: prepare it again"
            )
        for key in data.keys() - Manifest.__annotations__.keys():
            del data[key]
        manifest = Manifest(**data)
        _refuse_malformed(manifest)
        ungradable = "task" in manifest.statistics.get("answer_types", ())
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{text}/{MANIFEST} is damaged ({error}): prepare the dataset again") from None
    if ungradable:
        raise ConfigError(
            f"{text} has rows of the answer type `task`, which this version does not grade: prepare it again"
            " with plain answers, and the task in a column that a reward function of yours reads"
        )
    return manifest


def _refuse_malformed(manifest: Manifest) -> None:
    """Raises ValueError for values that no preparation writes: a manifest may come from a bucket, and its
    names must not lead out of a folder."""
    for split, count in manifest.rows.items():
        if not SPLIT_NAME.fullmatch(split) or type(count) is not int or count < 0:
            raise ValueError(f"a split {split!r:.80} of {count!r:.80} rows")
    for file in manifest.files:
        numbers = (file["rows"], file["bytes"])
        named = re.fullmatch(r"\w[\w.-]{0,150}\.parquet", file["path"], re.ASCII) and re.fullmatch(
            "[0-9a-f]*", file["sha256"]
        )
        if (
            not named
            or file["split"] not in manifest.rows
            or min(numbers) < 0
            or set(map(type, numbers)) != {int}
        ):
            raise ValueError(f"a file {file!r:.200}")
    if not re.fullmatch("[0-9a-f]*", manifest.fingerprint):
        raise ValueError(f"a fingerprint {manifest.fingerprint!r:.80}")
    for counts in (manifest.images_per_row, manifest.quarantined):
        if set(map(type, counts.values())) - {int}:
            raise ValueError(f"counts {counts!r:.80}")


def file_sha256(path: str | Path) -> str:
    """sha256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Dataset:
    """One split of a prepared dataset: `len(d)`, `d[i] -> Row`, iteration.

    Rows are asked as `prompting` says. Nothing is opened until a row is read.
    At a URL, whole shards are fetched into `cache_dir` when they
    are first used, checked against the manifest's sha256, and shared by all processes of the node.
    Raises ConfigError if there is no manifest, if the split is unknown, or if a shard is missing or
    does not have the size in the manifest.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        cache_dir: str | Path | None = None,
        manifest: Manifest | None = None,
        prompting: PromptWording = AS_STORED,
    ) -> None:
        self.path = str(path)
        self.split = split
        self.prompting = prompting
        self.manifest = manifest or read_manifest(path)
        self.fingerprint = self.manifest.fingerprint
        if split not in self.manifest.rows:
            raise ConfigError(
                f"no split {split!r} in {path}: it has {', '.join(self.manifest.rows) or 'no splits'}"
            )
        self._files = [f for f in self.manifest.files if f["split"] == split]
        self._starts = [0, *accumulate(file["rows"] for file in self._files)]
        cache = Path(cache_dir).expanduser() if cache_dir else cache_folder()
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
        # A process that gets the dataset opens its own files.
        state = self.__dict__.copy()
        for name in ("_lock", "_readers", "_cached"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._starts, index) - 1
        with self._lock:
            _, groups = self._reader(shard)
            local = index - self._starts[shard]
            group = bisect.bisect_right(groups, local) - 1
            return self._row(self._group(shard, group), local - groups[group])

    def __iter__(self) -> Iterator[Row]:
        """Yields the rows in order, with one row group in memory."""
        for shard in range(len(self._files)):
            with self._lock:
                groups = len(self._reader(shard)[1]) - 1
            for group in range(groups):
                with self._lock:
                    table = self._group(shard, group)
                for i in range(table.num_rows):
                    yield self._row(table, i)

    def _row(self, table: pa.Table, i: int) -> Row:
        values: dict[str, Any] = {n: table.column(n)[i].as_py() for n in COLUMNS if n in table.column_names}
        stored = chat_messages(values["messages"])
        messages = values["messages"] = self.prompting.asked(stored, values["source"])
        values["images"] = list(map(itemgetter("bytes"), values["images"]))
        extra = values["extra"] = json.loads(values["extra"] or "{}")
        if LEARNED in extra:  # they count messages
            extra[LEARNED] = [turn + len(messages) - len(stored) for turn in extra[LEARNED]]
        return Row(**values)

    def column(self, name: str) -> list[Any]:
        """All values of one column; others are not read. Not for `images`, which may not fit in memory."""
        values: list[Any] = []
        with self._lock:
            for shard in range(len(self._files)):
                reader, _ = self._reader(shard)
                values += reader.read(columns=[name]).column(0).to_pylist()
        return values

    @property
    def images_per_row(self) -> int:
        """Most images of any row, from the manifest or else from the lists of images, whose bytes are
        not read."""
        if self.split in self.manifest.images_per_row:
            return self.manifest.images_per_row[self.split]
        return max(map(len, self.column("images.list.element.path")), default=0)

    def tables(self, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
        """These columns of rows `start` to `stop` in order, one row group at a time."""
        for shard, first in enumerate(self._starts[:-1]):
            if first >= stop or self._starts[shard + 1] <= start:
                continue
            with self._lock:
                reader, groups = self._reader(shard)
            for group, (begin, end) in enumerate(pairwise(groups)):
                low = max(start - first, begin)
                high = min(stop - first, end)
                if low < high:
                    with self._lock:
                        table = reader.read_row_group(group, columns=list(columns))
                    yield table.slice(low - begin, high - low)

    def verify(self) -> None:
        """Reads every shard and compares its sha256 with the manifest. Raises ConfigError that names the
        damaged shard."""
        for file in self._files:
            if "://" in self.path:
                self._fetch(file)
            if file_sha256(self._dir / file["path"]) != file["sha256"]:
                raise ConfigError(
                    f"{self._dir / file['path']} is damaged (sha256 differs): prepare or fetch it again"
                )

    def _reader(self, shard: int) -> tuple[pq.ParquetFile, list[int]]:
        if shard not in self._readers:
            file = self._files[shard]
            if "://" in self.path:
                self._fetch(file)
            reader = pq.ParquetFile(self._dir / file["path"], memory_map=True)
            about = reader.metadata
            groups = [about.row_group(group).num_rows for group in range(reader.num_row_groups)]
            starts = [0, *accumulate(groups)]
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
            state = "missing" if size < 0 else f"{size} bytes, the manifest says {file['bytes']}"
            raise ConfigError(f"shard {path} is {state}: prepare the dataset again")

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
            if file_sha256(part) != file["sha256"]:
                part.unlink()
                raise ConfigError(
                    f"{self.path}/{file['path']} differs from its manifest (sha256): upload it again"
                )
            part.replace(path)


def chat_messages(stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a row, from those of the `messages` column, whose content is always a list of parts."""
    return [{"role": message["role"], "content": _content(message["content"])} for message in stored]


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    # Parquet gives an image's part an empty `text`.
    return [part if part["type"] == "text" else {"type": part["type"]} for part in parts]
