"""Copies files between this machine and an object store, lists one, and finds out what it allows.

python -m trainer.storage cp SOURCE TARGET | ls URL | probe URL [--read-only]
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.config import ConfigError
from trainer.storage.command import exit_code
from trainer.storage.probe import QUICK, probe
from trainer.storage.storage import Storage


def copy(source: str, target: str) -> tuple[int, int]:
    """Copies a file or folder between a local path and a store, with a progress bar. Returns (files, bytes)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    upload = "://" not in source
    if upload == ("://" not in target):
        raise ConfigError("cp copies between a local path and a store's URL: give one of each")
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    if upload:
        base = Path(source)
        if not base.exists():
            raise ConfigError(f"nothing at {source}")
        files = [base] if base.is_file() else sorted(p for p in base.rglob("*") if p.is_file())
        store, root = Storage(target), base.parent if base.is_file() else base
        jobs = [(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]
        move = lambda key, tick: store.put(root / key, key, tick)  # noqa: E731
    else:
        store = Storage(source)
        jobs, parent = store.list(), Path(target)
        if not jobs:  # not a folder: one object
            folder, _, name = source.rstrip("/").rpartition("/")
            store = Storage(folder)
            jobs = [(name, store.size(name) or 0)]
        move = lambda key, tick: store.get(key, parent / key, tick)  # noqa: E731
    with Progress(*columns) as bar:
        task = bar.add_task("copy", total=sum(size for _, size in jobs))
        for key, _ in jobs:
            bar.update(task, description=key)
            move(key, lambda count: bar.advance(task, count))
    return len(jobs), sum(size for _, size in jobs)


def run(arguments: list[str]) -> None:
    """The command line. Raises ConfigError, FileNotFoundError, StorageError."""
    match arguments:
        case ["cp", source, target]:
            count, size = copy(source, target)
            print(f"{count} files, {size} bytes")
        case ["ls", url]:
            for key, size in Storage(url).list():
                print(f"{size:>14} {key}")
        case ["probe", url, *rest] if rest in ([], ["--read-only"]):
            probe(url, write=not rest, retry=QUICK)
            print(f"{url} can be {'listed' if rest else 'written, listed, read and cleared'}")
        case _:
            raise ConfigError("usage: " + (__doc__ or "").splitlines()[2])


def main(arguments: list[str]) -> int:
    """The command line. Returns the exit code."""
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
