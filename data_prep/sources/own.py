"""Any folder, file or repository with questions and answers as a source: data files, their form, and
their images."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.ingest.archive import TAR_ENDINGS, Member, Refused, files_under, members, unpacked_bytes
from data_prep.ingest.wanted import Wanted
from data_prep.sources.forms import Form, detect
from data_prep.sources.records import ENDINGS, RAW_CHARS, UnreadableRecord, first_object, first_value, read
from data_prep.sources.source import SPLITS, BadRecord, BadRow, Candidate, split_name
from trainer.config import ConfigError
from trainer.data.dataset import file_sha256

SAMPLE = 50
"""Number of records by which the form of a file is found."""
MAX_SPLITS = 32
"""Most splits that a column may name: each one keeps a file open. A column of ids names thousands."""
BROKEN = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading a record of an unexpected shape may raise."""
_BASE64 = ("iVBOR", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0AK", "Qk0")
"""First characters of PNG, JPEG, GIF, WebP, TIFF and BMP in base64."""


def no_subsource(images: Sequence[str]) -> str:
    """The origin of rows whose images' paths name none."""
    return ""


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
    record: Callable[[], list[dict[str, Any]]] = list
    """Gives `files`; may wait until they are hashed."""
    subsource: Callable[[list[str]], str] = no_subsource
    """Gives the origin of a row that its images' paths name."""
    weight: float = 1.0

    @property
    def files(self) -> list[dict[str, Any]]:
        """[{"path", "bytes", "sha256"}] of all that is read."""
        return self.record()

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
                yield BadRow(index, *error.args, str(record)[:RAW_CHARS])
            except BROKEN as error:
                yield BadRow(index, "bad_record", f"{type(error).__name__}: {error}", str(record)[:RAW_CHARS])

    def _records(self) -> Iterator[tuple[int, str, dict[str, Any] | UnreadableRecord]]:
        index = 0
        for path, split in self.tables:
            for record in read(path):
                yield index, split, record
                index += 1

    def _candidate(self, index: int, split: str, record: dict[str, Any]) -> Candidate:
        parsed = self.form.parse(record)
        images = [_path(value) or f"@{index}-{k}" for k, value in enumerate(parsed.images)]
        origin = parsed.source or self.subsource(images)
        return Candidate(
            index=index,
            source=f"{self.name}/{origin}" if origin and origin != self.name else self.name,
            messages=parsed.messages,
            images=images,
            answer=parsed.answer,
            solution=parsed.solution,
            split=split_name(split or parsed.split),
            extra=parsed.extra,
        )

    def members(self, refused: Refused, wanted: Wanted) -> Iterator[Member]:
        """Images inside the records, those of archives and folders, then what lies where the paths say."""
        if any(name.startswith("@") for name in wanted.paths):
            yield from self._inside(refused)
        for root in self.roots:
            yield from members(root, refused)
        if self.beside is not None:
            for path in sorted(wanted.paths):
                found = self._beside(path)
                if wanted.member(path) is None and found:
                    yield Member(path, found.stat().st_size, found.read_bytes)

    def _inside(self, refused: Refused) -> Iterator[Member]:
        for index, _, record in self._records():
            if isinstance(record, UnreadableRecord):
                continue
            try:
                values = self.form.parse(record).images
            except (BadRecord, *BROKEN):
                continue  # `rows` reports it
            for k, value in enumerate(values):
                if not _path(value):
                    try:
                        yield Member.of(f"@{index}-{k}", _content(value))
                    except (ValueError, binascii.Error) as error:
                        refused.add(f"@{index}-{k}", str(error))

    def _beside(self, path: str) -> Path | None:
        if self.beside is None or path.startswith("@"):
            return None
        for folder in (self.beside, Path("/")):
            if (folder / path).is_file():
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


def _path(value: Any) -> str:
    """The path of an image that is a file of its own; empty where its content stands in the record."""
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return ""
        return _path(first_value(value, ("path", "url", "image", "image_url")))
    if not isinstance(value, str) or value.startswith(("data:", *_BASE64)) and len(value) > 64:
        return ""
    if re.match(r"https?://", value):
        raise BadRecord(
            "image_url", f"{value[:200]} is not on this machine: download the images, and give --images"
        )
    return normalized(value)


def _content(value: Any) -> bytes:
    """Bytes of an image inside a record. Raises ValueError."""
    if isinstance(value, dict):
        return _content(first_value(value, ("bytes", "url", "image", "image_url", "path"), b""))
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        head, comma, body = value.partition(",")
        encoded = body if comma and head.startswith("data:") else value
        return base64.b64decode("".join(encoded.split()), validate=True)  # lines of 76 characters
    raise ValueError(f"a {type(value).__name__} where an image should be")


def normalized(path: str) -> str:
    """An image's path without scheme, backslashes, `.` and leading slash; `..` is kept, and then
    matches nothing."""
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", path.strip()).replace("\\/", "/").replace("\\", "/")
    return str(PurePosixPath("/" + path)).lstrip("/")


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
    path: str | Path,
    name: str = "",
    images: Sequence[str | Path] = (),
    mapping: dict[str, str] | None = None,
    split: str = "",
    keep: bool = False,
    sft: bool = False,
) -> list[RecordSource]:
    """Sources of a local file or folder: one per form that its data files have.

    Args:
        path: a data file, or a folder with data files, images and archives.
        name: the dataset's name; default: that of the file or folder.
        images: archives and folders with images; default: the folder itself, or the files of the paths.
        mapping: role -> column; it comes before what is detected.
        split: the split of all rows; default: by the files' names, else train and validation by content.
        keep: whether columns without a role are kept in `extra`.
        sft: whether replies are learned as they are.

    Raises ConfigError if there is no data file, or none in a known form.
    """
    path = Path(path)
    roots = list(map(Path, images))
    if path.is_dir():
        found = list(files_under(path, Refused()))
        files = [file for file in found if file.suffix in ENDINGS and not file.name.startswith(".")]
        archives = [file for file in found if file.suffix == ".zip" or file.name.endswith(TAR_ENDINGS)]
        if not files:
            raise ConfigError(f"{path} has no data file: one of {', '.join(ENDINGS)} is looked for")
        roots = roots or [path, *archives]
        beside = path
    else:
        files = [path]
        beside = path.parent
    for root in (*roots, *files):
        if not root.exists():
            raise ConfigError(f"no file or folder {root}")
    splits = []
    for file in files:
        shown = file.name if len(files) == 1 else file.relative_to(path).as_posix()
        splits.append(split or split_of(shown))
    if set(splits) == {"train"} and not split:
        splits = [""] * len(splits)  # nothing else is there to validate on
    tables = list(zip(files, splits, strict=True))
    return by_form(tables, name or path.stem, roots, beside, mapping or {}, keep, sft)


def by_form(
    tables: list[tuple[Path, str]],
    name: str,
    roots: list[Path],
    beside: Path | None,
    mapping: dict[str, str],
    keep: bool,
    sft: bool = False,
) -> list[RecordSource]:
    """One source for each form among the files. Raises ConfigError for a file in no known form."""
    groups: dict[str, tuple[Form, list[tuple[Path, str]]]] = {}
    for table in tables:
        form = form_of(table[0], mapping, keep, sft)
        groups.setdefault(str(form), (form, []))[1].append(table)
    sources = []
    for form, files in groups.values():
        source = RecordSource(name, files, form, roots, beside)
        if form.name == "MathV60K":
            source.subsource = subsource
        source.record = cache(partial(hashes, source))
        sources.append(source)
    return sources


def form_of(path: Path, mapping: dict[str, str], keep: bool = False, sft: bool = False) -> Form:
    """The form of a file. Raises ConfigError that shows its first records and what was looked for."""
    sample = list(islice(read(path), SAMPLE))
    good = [record for record in sample if isinstance(record, dict)]
    try:
        if not good:
            raise ValueError("it has no record that can be read")
        return detect(good, mapping, keep, sft)
    except ValueError as error:
        shown = ""
        for i, record in enumerate(sample[:3]):
            shown += f"\n  record {i}: {_short(record)}"
        raise ConfigError(f"{path}: {error}{shown}") from None


def _short(record: dict[str, Any] | UnreadableRecord) -> str:
    if isinstance(record, UnreadableRecord):
        return f"{record.raw[:200]!r} ({record.detail})"
    return str(record)[:300]


def hashes(source: RecordSource) -> list[dict[str, Any]]:
    """Data files and archives by their content; a folder, or files beside, as one by all names and
    contents."""
    files = [path for path, _ in source.tables]
    files += filter(Path.is_file, source.roots)
    entries = []
    for path in dict.fromkeys(files):
        entries.append({"path": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})

    known = set(map(Path.resolve, files))
    for root in filter(Path.is_dir, source.roots):
        inside = []
        for path in files_under(root, Refused()):
            if path.resolve() not in known:
                inside.append((path.relative_to(root).as_posix(), path))
        entries.append(_digest("images", inside))

    if source.beside is not None and not source.roots:
        paths = set()
        for row in source.rows():
            if isinstance(row, Candidate):
                paths.update(row.images)
        files_beside = []
        for image in sorted(paths):
            file = source._beside(image)
            if file:
                files_beside.append((image, file))
        if files_beside:
            entries.append(_digest("images", files_beside))
    return entries


def _digest(name: str, files: list[tuple[str, Path]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    for relative, path in files:
        digest.update(f"{relative}\0{file_sha256(path)}\n".encode())
        size += path.stat().st_size
    return {"path": name, "bytes": size, "sha256": digest.hexdigest()}
