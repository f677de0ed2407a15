"""Any folder, file or repository with questions and answers as a source: data files, their form, and
their images."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.ingest.archive import (
    MAX_MEMBER_BYTES,
    TAR_ENDINGS,
    Member,
    Refused,
    file_member,
    files_under,
    members,
    unpacked_bytes,
)
from data_prep.ingest.wanted import Wanted
from data_prep.sources.file_records import ENDINGS, first_object, read
from data_prep.sources.forms import CHATS, ROLES, Form, detect
from data_prep.sources.image_values import image_content, image_path
from data_prep.sources.row_source import (
    RAW_CHARS,
    SPLITS,
    BadRecord,
    BadRow,
    Candidate,
    UnreadableRecord,
    split_name,
    text_of,
)
from data_prep.sources.text_files import TextForm
from trainer.config import ConfigError
from trainer.data.dataset import file_sha256

SAMPLE = 50
"""Number of records by which the form of a file is found."""
STRAY = 2
"""A column is a stray one where so many times as many records have another one for the same."""
MAX_SPLITS = 32
"""Most splits that a column may name: each one keeps a file open. A column of ids names thousands."""
BROKEN = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading a record of an unexpected shape may raise."""
MEDIA = ("video", "videos", "video_path", "audio", "audios", "audio_path")
"""Columns of what a model is not shown here."""


@dataclass(frozen=True)
class Given:
    """What a person says of data files."""

    mapping: dict[str, str] = field(default_factory=dict)
    """Role -> column; it comes before what is detected."""
    split: str = ""
    """The split of all rows; empty: by the files' names, else train and validation by content."""
    keep: bool = False
    """Whether columns without a role are kept in `extra`."""
    sft: bool = False
    """Whether replies are learned as they are."""
    text: TextForm = TextForm()
    """Encoding and delimiter of text files."""


@dataclass
class RecordSource:
    """Rows of data files of one form. An image inside a record is named `@ROW-K`, others by their paths."""

    name: str
    tables: list[tuple[Path, str]]
    """(file, split of its rows; empty: to be split)."""
    form: Form
    roots: list[Path] = field(default_factory=list)
    """Archives and folders with images, which paths match by their endings."""
    beside: Path | None = None
    """Folder that paths are relative to if none of the roots has them."""
    revision: str = ""
    fetched: list[dict[str, Any]] | None = None
    """`files`, where they were hashed as they were fetched."""
    detected: bool = False
    """Whether the form was found by the first records, and nobody stated it."""
    text: TextForm = TextForm()
    """How its text files are read, as far as a person said so."""
    notes: Counter[str] = field(default_factory=Counter)
    """What was remarkable about the records when they were last read, counted."""

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        """[{"path", "bytes", "sha256"}] of all that is read: data files and archives by their content; a
        folder, or files beside, as one by all names and contents."""
        if self.fetched is not None:
            return self.fetched
        files = [path for path, _ in self.tables]
        files += filter(Path.is_file, self.roots)
        entries = []
        for path in dict.fromkeys(files):
            entries.append({"path": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
        known = set(map(Path.resolve, files))
        for root in filter(Path.is_dir, self.roots):
            inside = []
            for path in files_under(root, Refused()):
                if path.resolve() not in known:
                    inside.append((path.relative_to(root).as_posix(), path))
            entries.append(_digest("images", inside))
        if self.beside is None or self.roots:
            return entries
        paths: set[str] = set()
        for row in self.rows():
            paths.update(row.images if isinstance(row, Candidate) else ())
        files_beside = [(image, file) for image in sorted(paths) if (file := self._beside(image))]
        return [*entries, *([_digest("images", files_beside)] if files_beside else [])]

    def rows(self) -> Iterator[Candidate | BadRow]:
        """Parses the records one by one. A record that cannot be parsed is a BadRow, never an exception."""
        splits: set[str] = set()
        for index, split, record in self._records():
            if isinstance(record, UnreadableRecord):
                yield BadRow(index, "bad_json", record.detail, record.raw)
                continue
            try:
                row = self._candidate(index, split, record)
                if row.split not in splits and len(splits) == MAX_SPLITS:
                    raise BadRecord("bad_record", f"{row.split!r} is a split after {MAX_SPLITS} others")
                splits.add(row.split)
                yield row
            except BadRecord as error:
                yield BadRow(index, *error.args, _raw(record))
            except BROKEN as error:
                yield BadRow(index, "bad_record", f"{type(error).__name__}: {error}", _raw(record))

    def _records(self) -> Iterator[tuple[int, str, dict[str, Any] | UnreadableRecord]]:
        index = 0
        self.notes.clear()
        for path, split in self.tables:
            for record in read(path, self.text, self.notes):
                yield index, split, record
                index += 1

    def _candidate(self, index: int, split: str, record: dict[str, Any]) -> Candidate:
        parsed = self.form.parse(record)
        self._refuse_media(record)
        images = [image_path(value) or f"@{index}-{k}" for k, value in enumerate(parsed.images)]
        origin = parsed.source or (subsource(images) if self.form.is_mathv60k else "")
        row = Candidate(
            index=index,
            source=f"{self.name}/{origin}" if origin and origin != self.name else self.name,
            messages=parsed.messages,
            images=images,
            answer=parsed.answer,
            solution=parsed.solution,
            split=split_name(split or parsed.split),
            extra=json.loads(json.dumps(parsed.extra, default=text_of)) if parsed.extra else {},
        )
        _refuse_halves(row)
        return row

    def _refuse_media(self, record: dict[str, Any]) -> None:
        """Raises BadRecord for a video, sound, image or choices that training would not show."""
        for name in MEDIA:
            value = record.get(name)
            stated = any(value.values()) if isinstance(value, dict) else value
            if stated and name not in self.form.columns.values():
                raise BadRecord("other_media", f"there is something in {name}, and only images are shown")
        for role in ("images", "choices") if self.detected else ():
            if self.form.value(record, role):
                continue
            for name in ROLES[role]:
                if record.get(name) and name not in self.form.columns.values():
                    read_from = self.form.columns.get(role, f"no column of the first {SAMPLE} records")
                    raise BadRecord("bad_record", f"{role} in {name}, and they are read from {read_from}")

    def members(self, refused: Refused, wanted: Wanted) -> Iterator[Member]:
        """Images inside the records, those of archives and folders, then what lies where the paths say."""
        if any(name.startswith("@") for name in wanted.paths):
            yield from self._inside(refused)
        for root in self.roots:
            yield from members(root, refused)
        if self.beside is not None:
            for path in sorted(wanted.paths):
                file = self._beside(path)
                if wanted.member(path) is None and file:
                    yield from file_member(path, file, refused)

    def _inside(self, refused: Refused) -> Iterator[Member]:
        for index, _, record in self._records():
            if isinstance(record, UnreadableRecord):
                continue
            try:
                values = self.form.parse(record).images
                inside = [(k, value) for k, value in enumerate(values) if not image_path(value)]
            except (BadRecord, *BROKEN):
                continue  # `rows` reports it
            for k, value in inside:
                try:
                    yield Member.of(f"@{index}-{k}", image_content(value))
                except ValueError as error:
                    refused.add(f"@{index}-{k}", str(error))

    def _beside(self, path: str) -> Path | None:
        if self.beside is None or path.startswith("@"):
            return None
        for folder in (self.beside, Path("/")):
            if os.path.isfile(folder / path):
                return folder / path
        return None

    def image_bytes(self) -> int:
        """About how many bytes all images have."""
        size = sum(map(unpacked_bytes, self.roots))
        if "images" in self.form.columns:
            size += sum(path.stat().st_size for path, _ in self.tables)
        return size

    def describe(self) -> list[tuple[str, str, str]]:
        """(role, column, value in the first record): what was found, for the user to look at."""
        first = first_object(map(itemgetter(2), self._records()))
        lines = []
        for role, column in self.form.columns.items():
            value = str(self.form.value(first, role)).replace("\n", " ")
            lines.append((role, column, value[:70]))
        used = set()
        for columns in self.form.columns.values():
            used |= {column.partition(".")[0] for column in columns.split(",")}
        unused = [name for name in first if name not in used]
        if unused:
            lines.append(("(unused)", ", ".join(unused)[:100], ""))
        return lines


def _refuse_halves(row: Candidate) -> None:
    """Raises BadRecord where a text has half a character, such as half an emoji, which no file can hold."""
    texts = [row.source, row.messages, row.images, row.answer, row.solution, row.extra]
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end + 20]
        detail = f"half a character in {near!r}; if many rows have some, name the file's --encoding"
        raise BadRecord("bad_record", detail) from None


def _raw(record: dict[str, Any]) -> str:
    return str(_start(record))[:RAW_CHARS]


def _start(value: Any, depth: int = 8) -> Any:
    """The start of a value: an image in it is not written as text first."""
    if isinstance(value, (str, bytes)):
        return value[:400]
    if isinstance(value, dict) and depth:
        return {name: _start(inside, depth - 1) for name, inside in islice(value.items(), 50)}
    if isinstance(value, list) and depth:
        return [_start(inside, depth - 1) for inside in value[:20]]
    return "..." if isinstance(value, (dict, list)) else value


@lru_cache(maxsize=1 << 16)
def _folder(path: str) -> str:
    parts = PurePosixPath(path).parts
    tops = [i for i, part in enumerate(parts) if part.endswith("_img")]
    inside = parts[tops[-1] + 1 : -1] if tops else ()
    return inside[0] if inside and inside[0] not in ("images", "image", "train", "test") else ""


def subsource(images: Sequence[str]) -> str:
    """The source set that the first image's folder names (`mathv60k_img/IconQA/images/7.png` ->
    `IconQA`), or empty."""
    return _folder(images[0]) if images else ""


def split_of(path: str) -> str:
    """The split that a file's name states, or empty."""
    words = re.split(r"[/_.\-]", path.lower())
    for word in words:
        if word in ("train", "validation", "test", *SPLITS):
            return split_name(word)
    return ""


def own(
    path: str | Path, name: str = "", images: Sequence[str | Path] = (), given: Given = Given()
) -> list[RecordSource]:
    """Sources of a local file or folder: one per form that its data files have.

    Args:
        path: a data file, or a folder with data files, images and archives.
        name: the dataset's name; default: that of the file or folder.
        images: archives and folders with images; default: the folder itself, or the files of the paths.

    Raises ConfigError if there is no data file, or none in a known form.
    """
    path = Path(path)
    roots = list(map(Path, images))
    files = [path]
    if path.is_dir():
        inside = list(files_under(path, Refused()))
        files = [file for file in inside if file.suffix in ENDINGS and not file.name.startswith(".")]
        archives = [file for file in inside if file.suffix == ".zip" or file.name.endswith(TAR_ENDINGS)]
        if not files:
            raise ConfigError(f"{path} has no data file: one of {', '.join(ENDINGS)} is looked for")
        roots = roots or [path, *archives]
    for root in (*roots, *files):
        if not root.exists():
            raise ConfigError(f"no file or folder {root}")
    names = [file.name if len(files) == 1 else file.relative_to(path).as_posix() for file in files]
    beside = path if path.is_dir() else path.parent
    return by_form(files, names, name or path.stem, roots, beside, given)


def by_form(
    files: Sequence[Path],
    paths: Sequence[str],
    name: str,
    roots: list[Path],
    beside: Path | None,
    given: Given,
) -> list[RecordSource]:
    """One source for each form among the files, whose splits their published `paths` state.

    Raises ConfigError for a file in no known form.
    """
    splits = [given.split or split_of(path) for path in paths]
    if set(splits) == {"train"} and not given.split:
        splits = [""] * len(splits)  # nothing else is there to validate on
    sources: dict[str, RecordSource] = {}
    for table in zip(files, splits, strict=True):
        form = form_of(table[0], given)
        new = RecordSource(name, [], form, roots, beside, detected=True, text=given.text)
        sources.setdefault(str(form), new).tables.append(table)
    return list(sources.values())


def form_of(path: Path, given: Given) -> Form:
    """The form of a file. Raises ConfigError that shows its first records and what was looked for."""
    sample = list(islice(read(path, given.text), SAMPLE))
    good = [record for record in sample if isinstance(record, dict)]
    try:
        if not good:
            raise ValueError("it has no record that can be read")
        return detect(_without_strays(good, given.mapping), given.mapping, given.keep, given.sft)
    except ValueError as error:
        shown = ""
        for i, record in enumerate(sample[:3]):
            shown += f"\n  record {i}: {_short(record)}"
        raise ConfigError(f"{path}: {error}{shown}") from None


def _without_strays(records: list[dict[str, Any]], mapping: dict[str, str]) -> list[dict[str, Any]]:
    """Records without columns that a few of them have in place of what the others have: these would be read
    by the column of a few."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(name for name, value in record.items() if value not in (None, "", []))
    strays: set[str] = set()
    for names in ((*ROLES["question"], *CHATS), *ROLES.values()):
        usual = max(counts[name] for name in names)
        strays |= {name for name in names if STRAY * counts[name] < usual}
    strays -= {column.partition(".")[0] for column in mapping.values()}
    return [{name: value for name, value in record.items() if name not in strays} for record in records]


def _short(record: dict[str, Any] | UnreadableRecord) -> str:
    if isinstance(record, UnreadableRecord):
        return f"{record.raw[:200]!r} ({record.detail})"
    return _raw(record)[:300]


def _digest(name: str, files: list[tuple[str, Path]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    for relative, path in files:
        length = path.stat().st_size
        # No more is read than of an image: a file of the kernel says that it is empty, and may not end.
        content = file_sha256(path) if 0 < length <= MAX_MEMBER_BYTES else ""
        digest.update(f"{relative}\0{content}\n".encode())
        size += length
    return {"path": name, "bytes": size, "sha256": digest.hexdigest()}
