"""Disks that are really full, or really cannot be written: a small tmpfs, a read-only mount. They need
root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


def mount(*words: str) -> None:
    """Mounts, or skips the test where that is not allowed."""
    if subprocess.run(["mount", *words], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Generator[Path]:
    """A folder on a disk of its own."""
    path.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def read_only(path: Path, yes: bool = True) -> None:
    """Makes a small disk read-only, as a kernel does that has met an error of it, or writable again."""
    mount("-o", f"remount,{'ro' if yes else 'rw'}", str(path))


def fill(disk: Path) -> Path:
    """Takes all that is free; returns the file that does."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for block in (b"x" * (1 << 20), b"x" * 4096):
            with contextlib.suppress(OSError):
                while file.write(block) == len(block):
                    pass
    return filler
