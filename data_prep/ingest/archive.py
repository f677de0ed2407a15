"""Reads an image archive once, as a stream: there is no second copy, and no file gets a name that the
archive chose."""

from __future__ import annotations

import bz2
import contextlib
import errno
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from trainer.config import ConfigError

MAX_MEMBER_BYTES = 128 << 20
"""Largest file that is read; a larger one is no image that could be trained on."""
MAX_NAME = 4096
"""Characters of a member's name."""
MAX_INFLATION = 1000
"""Largest factor by which a zip member beyond SMALL_BYTES may inflate. Images inflate by less."""
SMALL_BYTES = 16 << 20
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


@dataclass
class Refused:
    """Members that were not read, and why."""

    members: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason)."""
    _reasons: dict[str, str] = field(default_factory=dict)
    """Reason by the last part of a name."""

    def add(self, name: str, reason: str) -> None:
        printable = name[:300].encode("utf-8", "backslashreplace").decode()
        self.members.append((printable, reason))
        self._reasons.setdefault(printable.rpartition("/")[2], reason)

    def reason(self, path: str) -> str:
        """Why the file that a path names was not read; empty if it was not refused."""
        return self._reasons.get(path.rpartition("/")[2], "")


def safe_name(name: str) -> str:
    """The member's path relative to the archive's root, normalized. Raises ValueError if it points outside.

    The images never become files of that name, so nothing could be overwritten; but an archive with
    such names is damaged or hostile, and what they hold is not trusted.
    """
    if "\0" in name:
        raise ValueError("name contains a NUL byte")
    if len(name) > MAX_NAME:
        raise ValueError(f"name of {len(name)} characters")
    if not _is_utf8(name):
        raise ValueError("name is not UTF-8")
    if "\\" in name:
        raise ValueError("name contains a backslash")
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        raise ValueError("absolute path")
    parts: list[str] = []
    for part in PurePosixPath(name).parts:
        if part == "..":
            raise ValueError("path leaves the archive")
        parts.append(part)
    if not parts:
        raise ValueError("empty name")
    return "/".join(parts)


def _is_utf8(name: str) -> bool:
    """Whether a name has none of the surrogates that stand for bytes which are no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def link_target(member: str, target: str, hard: bool) -> str:
    """Path that a link points to, relative to the archive's root. Raises ValueError if it is outside."""
    if target.startswith("/") or "\\" in target or "\0" in target or not _is_utf8(target):
        raise ValueError(f"link to {target!r} leaves the archive")
    base = [] if hard else member.split("/")[:-1]
    for part in PurePosixPath(target).parts:
        if part == "..":
            if not base:
                raise ValueError(f"link to {target!r} leaves the archive")
            base.pop()
        elif part != ".":
            base.append(part)
    return "/".join(base)


@dataclass(frozen=True)
class Member:
    """One file of an archive or folder, or a link to an earlier one."""

    name: str
    size: int = 0
    """Bytes, as the archive states it; at most MAX_MEMBER_BYTES."""
    read: Callable[[], bytes] = bytes
    """Its content; to be called before the next member is asked for, or not at all."""
    link: str = ""
    """Name of the member that this one is an alias of."""

    @classmethod
    def of(cls, name: str, data: bytes) -> Member:
        """A member whose content is in memory."""
        return cls(name, len(data), lambda: data)


def members(path: Path, refused: Refused) -> Iterator[Member]:
    """Files of a tar (plain, gzip, bzip2, xz), a zip or a folder, in its own order, one in memory at a time.

    Unsafe members are left out and noted in `refused`. Raises ConfigError if the archive is truncated,
    damaged or of no known kind.
    """
    if path.is_dir():
        yield from _folder(path, refused)
    elif path.suffix == ".zip":
        yield from _zip(path, refused)
    elif path.name.endswith(TAR_ENDINGS):
        yield from _tar(path, refused)
    else:
        raise ConfigError(
            f"{path}: not an archive that can be read; use .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .zip"
        )


def _decompressed(path: Path) -> IO[bytes]:
    if path.name.endswith((".gz", ".tgz")):
        from isal import igzip_threaded

        return igzip_threaded.open(path, "rb", block_size=1 << 20)
    if path.name.endswith((".bz2", ".tbz2")):
        return cast(IO[bytes], bz2.open(path, "rb"))
    if path.name.endswith((".xz", ".txz")):
        return cast(IO[bytes], lzma.open(path, "rb"))
    return open(path, "rb")


def _tar(path: Path, refused: Refused) -> Iterator[Member]:
    with (
        _damage_named(path),
        _decompressed(path) as stream,
        tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 18) as tar,
    ):
        index: Any = tar
        for info in tar:
            index.members = []  # a stream is read once, so tarfile need not remember its members
            if info.isdir():
                continue
            try:
                name = safe_name(info.name)
                if info.islnk() or info.issym():
                    yield Member(name, link=link_target(name, info.linkname, hard=info.islnk()))
                    continue
            except ValueError as error:
                refused.add(info.name, str(error))
                continue
            file = tar.extractfile(info) if info.isfile() else None
            if file is None:
                refused.add(info.name, "neither file, folder nor link")
                continue
            if info.size > MAX_MEMBER_BYTES:
                refused.add(name, f"{info.size} bytes, more than {MAX_MEMBER_BYTES}")
                continue
            yield Member(name, info.size, partial(_whole, file, info.size, path))
        _expect_end(tar)


@contextlib.contextmanager
def _damage_named(path: Path) -> Generator[None]:
    """Turns what a damaged archive raises into ConfigError: decoders raise anything. The disk's pass."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is truncated, damaged or no archive ({reason}): download it again"
        ) from None


def _whole(file: IO[bytes], size: int, path: Path) -> bytes:
    with _damage_named(path):
        data = file.read()
        if len(data) != size:
            raise ValueError("a file that is shorter than it says")
    return data


def _expect_end(tar: tarfile.TarFile) -> None:
    """Reads to the end, which checks the stream's checksum. tarfile itself stops at a damaged header in
    silence."""
    stream: Any = tar.fileobj
    while chunk := stream.read(1 << 20):
        if chunk.strip(b"\0"):
            raise ValueError("not a header where one should be")


def _zip(path: Path, refused: Refused) -> Iterator[Member]:
    with _damage_named(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise ConfigError(f"{info.filename} in {path} is encrypted: unpack it, and give the folder")
            try:
                name = _safe_in_zip(info)
            except ValueError as error:
                refused.add(info.filename, str(error))
                continue
            yield Member(name, info.file_size, partial(_inflated, archive, info, path))


def _inflated(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    with _damage_named(path):
        data = archive.read(info)
        if len(data) != info.file_size:
            raise ValueError("a file of another size than it says")
        return data


def _safe_in_zip(info: zipfile.ZipInfo) -> str:
    """The member's name. Raises ValueError where it must not be read."""
    name = safe_name(info.filename)
    if (info.external_attr >> 28) == 0o12:
        raise ValueError("symbolic link in a zip")
    if info.file_size > MAX_MEMBER_BYTES:
        raise ValueError(f"{info.file_size} bytes, more than {MAX_MEMBER_BYTES}")
    if info.file_size > SMALL_BYTES and info.file_size > MAX_INFLATION * info.compress_size:
        raise ValueError(f"{info.compress_size} bytes that inflate to {info.file_size}")
    return name


def _folder(root: Path, refused: Refused) -> Iterator[Member]:
    """Symbolic links are followed, also out of the folder: the hub's cache consists of such links."""
    for path in files_under(root, refused):
        yield from file_member(path.relative_to(root).as_posix(), path, refused)


def file_member(name: str, path: Path, refused: Refused) -> Iterator[Member]:
    """A file of this machine as a member, unless it is too large, has a name that is no text, or may not be
    read."""
    size = path.stat().st_size
    if size > MAX_MEMBER_BYTES:
        refused.add(name, f"{size} bytes, more than {MAX_MEMBER_BYTES}")
    elif not _is_utf8(name):
        refused.add(name, "name is not UTF-8")
    elif not os.access(path, os.R_OK):
        refused.add(name, "this user may not read it")
    else:
        yield Member(name, size, partial(_first_bytes, path, size))


def _first_bytes(path: Path, size: int) -> bytes:
    """As many bytes as the file stated: one of the kernel's may not end."""
    with open(path, "rb") as file:
        return file.read(size)


def files_under(root: Path, refused: Refused) -> Iterator[Path]:
    """All regular files, in a fixed order; links to folders are followed once each."""
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders.sort()
        for name in sorted(names):
            path = Path(folder) / name
            try:
                if path.is_file():
                    yield path
                    continue
                reason = "a link to nothing" if path.is_symlink() else "neither file, folder nor link"
            except (OSError, RuntimeError) as error:  # a ring of links
                reason = str(error)
            refused.add(path.relative_to(root).as_posix(), reason)


def unpacked_bytes(path: Path) -> int:
    """Bytes that the archive's contents take, known before it is read (an estimate for bzip2 and xz:
    twice the file).

    gzip stores the length modulo 4 GiB in its last four bytes; images do not shrink, so the smallest
    length that is not well below the file's own is taken.
    """
    if path.is_dir():
        return sum(file.stat().st_size for file in files_under(path, Refused()))
    size = path.stat().st_size
    if path.suffix == ".zip":
        with _damage_named(path), zipfile.ZipFile(path) as archive:
            sizes = [info.file_size for info in archive.infolist()]
            return sum(size for size in sizes if size <= MAX_MEMBER_BYTES)
    if path.name.endswith((".gz", ".tgz")) and size > 4:
        with open(path, "rb") as file:
            file.seek(-4, io.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
        while length < 0.9 * size:
            length += 1 << 32
        return length
    return size if path.suffix == ".tar" else 2 * size
