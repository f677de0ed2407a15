"""Copies files between this machine and an object store, lists one, and finds out what it allows.

python -m trainer.storage cp SOURCE TARGET | send FOLDER URL | fetch URL FOLDER | ls URL | cat URL KEY
| probe URL [--read-only]

send leaves out files that are there with the same size; fetch leaves a folder that is whole, or none.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainer.config import ConfigError
from trainer.storage.storage import Storage, probe_store
from trainer.storage.stores import QUICK
from trainer.storage.transfer import MIB, download, fetch_whole_folder, upload
from trainer.system.exit_codes import exit_code

MOST_SHOWN = 4 << 20
"""Bytes of an object that `cat` reads into memory."""


def copy_files(how: str, source: str, target: str) -> tuple[int, int]:
    """Copies a file or folder between a local path and a store. Returns (files, bytes)."""
    if ("://" in source) == ("://" in target):
        raise ConfigError(f"{how} copies between a local path and a store's URL: give one of each")
    if "://" in target:
        return upload(Path(source), target, resume=how == "send")
    return fetch_whole_folder(source, Path(target)) if how == "fetch" else download(source, Path(target))


def run(arguments: list[str]) -> None:
    """The command line. Raises ConfigError, FileNotFoundError, StorageError."""
    match arguments:
        case ["cp" | "send" | "fetch" as how, source, target]:
            began = time.monotonic()
            count, moved = copy_files(how, source, target)
            print(f"{count} files, {moved / MIB:,.1f} MiB in {time.monotonic() - began:.0f} s")
        case ["ls", url]:
            for key, count in Storage(url).list():
                print(f"{count:>14} {key}")
        case ["cat", url, key]:
            sys.stdout.buffer.write(Storage(url).get_bytes(key, MOST_SHOWN))
        case ["probe", url, *rest] if rest in ([], ["--read-only"]):
            probe_store(url, write=not rest, retry=QUICK)
            print(f"{url} can be {'listed' if rest else 'written, listed, read and cleared'}")
        case _:
            raise ConfigError("usage: " + " ".join((__doc__ or "").splitlines()[2:4]))


def main(arguments: list[str]) -> int:
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
