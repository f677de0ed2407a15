"""Whole folders between this machine and a store, with a line every few seconds. Needs nothing but
obstore."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.config import ConfigError
from trainer.config.never_sent import is_secret
from trainer.storage.storage import Storage
from trainer.system.contained_path import inside

MIB = 1 << 20
TELL_S = 10.0
"""Seconds between two lines."""


def progress_of(title: str, total: int) -> Callable[[int], None]:
    """What is called with the bytes just moved, and says how far a transfer has come, and how long the rest
    will take at this speed."""
    began = printed = time.monotonic()
    done = 0

    def moved(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        if now - printed < TELL_S:
            return
        printed = now
        rate = done / (now - began)
        left = f"{(total - done) / rate:.0f} s left" if rate else "no end in sight"
        line = f"{title}: {done / MIB:,.1f} of {total / MIB:,.1f} MiB, {rate / MIB:,.1f} MiB/s, {left}"
        print(line, file=sys.stderr, flush=True)

    return moved


LAST = ("config.json", "manifest.json")
"""Sent after all others: a folder that has one is whole."""


def upload(source: Path, url: str, resume: bool = False) -> tuple[int, int]:
    """Uploads a file or folder. Returns (files, bytes) sent. resume: what is there with the same size is not
    sent again; for a URL under which only these bytes are ever put."""
    if not source.exists():
        raise ConfigError(f"nothing at {source}")
    store, root = Storage(url), source.parent if source.is_file() else source
    stored = dict(store.list()) if resume else {}
    wanted = []
    for path in [source] if source.is_file() else sorted(filter(Path.is_file, source.rglob("*"))):
        key, count = path.relative_to(root).as_posix(), path.stat().st_size
        if source.is_dir() and is_secret(key):
            print(f"{key} is not sent: its name is that of a secret", file=sys.stderr, flush=True)
        elif stored.get(key) != count:
            wanted.append((key, count))
    total = sum(count for _, count in wanted)
    progress = progress_of(f"upload to {url}", total)
    for key, count in sorted(wanted, key=lambda file: file[0] in LAST):
        store.put(root / key, key)
        progress(count)
    return len(wanted), total


def download(url: str, target: Path) -> tuple[int, int]:
    """Downloads a folder, or one object, below a folder of this machine. Returns (files, bytes)."""
    store = Storage(url)
    objects = store.list()
    if not objects:  # not a folder: one object
        folder, _, name = url.rstrip("/").rpartition("/")
        store = Storage(folder)
        objects = [(name, store.size(name) or 0)]
    total = sum(count for _, count in objects)
    progress = progress_of(f"download of {url}", total)
    for key, _ in objects:
        path = inside(target, key)
        if path is None:
            raise ConfigError(f"{url} holds {key!r}, which would be written outside of {target}: remove it")
        store.get(key, path, progress)
    return len(objects), total


def fetch_whole_folder(url: str, target: Path) -> tuple[int, int]:
    """Downloads a folder, whole or not at all. Raises ConfigError where the store has none."""
    if not Storage(url).list():
        raise ConfigError(f"nothing at {url}: `python3 launch.py up` uploads it before anything is rented")
    part = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        moved = download(url, part)
        if not target.exists():  # nodes may share the disk
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return moved
