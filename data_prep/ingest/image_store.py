"""Unpacks the images of a source into one file, `images.bin`, checks them, and keeps a ledger of what
is done.

The archive is read once, as a stream. Each wanted image is appended to the pack. Worker processes read
it from there, decode it and return the facts; then a line of the ledger says where it lies. A
preparation that was interrupted reads the stream again, but neither writes nor decodes what the ledger
already has.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from data_prep.ingest.archive import Member
from data_prep.ingest.checking import Checks
from data_prep.ingest.images import ImageFacts
from data_prep.ingest.wanted import Wanted
from trainer.images.decoding import ImageLimits

BATCH_BYTES = 4 << 20
"""About how many bytes of images a worker gets at once."""
BATCH_FILES = 256
"""Most files of the archive for a batch."""


@dataclass(frozen=True)
class Stored:
    """One image of the pack."""

    offset: int
    size: int
    """Bytes."""
    facts: ImageFacts


class ImageStore:
    """Checked images by name: `fill` the store, then call `facts` and `read`."""

    def __init__(self, work_dir: Path, limits: ImageLimits, key: str) -> None:
        """Opens `work_dir`.

        What a former run left there is kept if `key`, the files and limits, is the same.
        """
        work_dir.mkdir(parents=True, exist_ok=True)
        self._pack_path = work_dir / "images.bin"
        self._ledger_path = work_dir / "images.jsonl"
        self._limits = limits
        self._key = key
        self.stored: dict[str, Stored] = {}
        self.conflicting: set[str] = set()
        """Names of several members with different content."""
        self.resumed = 0
        self._end = 0
        self._recover()
        mode = "r+b" if self._pack_path.exists() else "w+b"
        self._pack = open(self._pack_path, mode, buffering=1 << 20)  # noqa: SIM115
        self._pack.truncate(self._end)
        self._pack.seek(self._end)

    def _recover(self) -> None:
        """Reads the ledger up to its first incomplete line, and cuts it there."""
        good = 0
        size = self._pack_path.stat().st_size if self._pack_path.exists() else 0
        if self._ledger_path.exists():
            with open(self._ledger_path, "rb") as ledger:
                for number, line in enumerate(ledger):
                    try:
                        entry = json.loads(line)
                        if number == 0:
                            if entry != {"key": self._key}:
                                break
                        else:
                            name, offset, length, facts = entry
                            if offset + length > size:
                                break
                            self.stored[name] = Stored(offset, length, ImageFacts(**facts))
                            self._end = max(self._end, offset + length)
                    except (ValueError, TypeError):
                        break
                    good += len(line)
        self.resumed = len(self.stored)
        self._ledger = open(self._ledger_path, "r+b" if good else "w+b")  # noqa: SIM115
        self._ledger.truncate(good)
        self._ledger.seek(good)
        if not good:
            self._ledger.write(json.dumps({"key": self._key}).encode() + b"\n")
            self._ledger.flush()

    def fill(
        self,
        members: Callable[[], Iterable[Member]],
        wanted: Wanted,
        workers: int,
        on_progress: Callable[[int, int], None] = lambda images, size: None,
    ) -> int:
        """Stores and checks the wanted images, in one pass over `members()`.

        Returns how many nobody asked for.

        A second pass is made only for links whose targets nobody asked for by name. Memory holds one
        batch whatever the archive's size. `on_progress(images, bytes)` follows each batch that was
        checked.
        """
        links: dict[str, str] = {}
        with closing(Checks(self._pack_path, self._limits, workers)) as checks:
            unused = self._pass(checks, members(), wanted, links, on_progress)
            links = {name: _follow(name, links) for name in links if wanted.match(name)}
            targets = set(links.values())
            if targets - self.stored.keys():
                self._pass(checks, members(), Wanted(targets), {}, lambda images, size: None)
        for name, target in sorted(links.items()):
            if name not in self.stored and target in self.stored:
                self._record(name, self.stored[target])
        self._ledger.flush()
        return unused

    def _pass(
        self,
        checks: Checks,
        members: Iterable[Member],
        wanted: Wanted,
        links: dict[str, str],
        on_progress: Callable[[int, int], None],
    ) -> int:
        waiting: deque[_Batch] = deque()  # only names wait here, so unpacking may run far ahead
        unused = 0

        def settle_first() -> None:
            batch = waiting.popleft()
            for (name, offset, size), image in zip(batch.places, checks.take(), strict=True):
                self._record(name, Stored(offset, size, image))
            self._ledger.flush()
            on_progress(batch.seen, batch.seen_bytes)

        for batch in self._batches(members, wanted, links):
            unused += batch.unused
            self._pack.flush()
            checks.submit([place[1:] for place in batch.places])
            waiting.append(batch)
            while checks.ready:
                settle_first()
        while len(checks):
            settle_first()
        return unused

    def _batches(self, members: Iterable[Member], wanted: Wanted, links: dict[str, str]) -> Iterator[_Batch]:
        batch = _Batch()
        appended: dict[str, tuple[int, int]] = {}
        seen: set[str] = set()
        for member in members:
            batch.seen += 1
            batch.seen_bytes += member.size
            if member.link:
                links[member.name] = member.link
            elif not wanted.match(member.name):
                batch.unused += 1
            elif member.name in seen:
                self._compare(member, appended)
            elif member.name not in self.stored:
                data = member.read()
                self._pack.write(data)
                appended[member.name] = self._end, len(data)
                batch.places.append((member.name, self._end, len(data)))
                batch.bytes += len(data)
                self._end += len(data)
            seen.add(member.name)
            if batch.bytes >= BATCH_BYTES or batch.seen >= BATCH_FILES:
                yield batch
                batch = _Batch()
        yield batch

    def _compare(self, member: Member, appended: dict[str, tuple[int, int]]) -> None:
        """Compares a second member of a name. If its content differs, it is not known which one is meant."""
        self._pack.flush()
        stored = self.stored.get(member.name)
        offset, size = (stored.offset, stored.size) if stored else appended[member.name]
        if os.pread(self._pack.fileno(), size, offset) != member.read():
            self.conflicting.add(member.name)

    def _record(self, name: str, stored: Stored) -> None:
        self.stored[name] = stored
        line = json.dumps([name, stored.offset, stored.size, vars(stored.facts)], ensure_ascii=False)
        self._ledger.write(line.encode() + b"\n")

    def facts(self, name: str) -> ImageFacts | None:
        """Facts about an image; None if the source has none of this name."""
        stored = self.stored.get(name)
        return stored.facts if stored else None

    def read(self, name: str) -> bytes:
        stored = self.stored[name]
        return os.pread(self._pack.fileno(), stored.size, stored.offset)

    def close(self, remove: bool = False) -> None:
        """Closes the files.

        `remove` deletes them, once the dataset is complete and holds the images itself.
        """
        self._pack.close()
        self._ledger.close()
        if remove:
            self._pack_path.unlink()
            self._ledger_path.unlink()


class _Batch:
    """Images that were appended to the pack, waiting for a worker."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int, int]] = []
        self.bytes = 0
        self.seen = 0
        self.seen_bytes = 0
        self.unused = 0


def _follow(name: str, links: dict[str, str]) -> str:
    """The file at the end of a chain of links (any name of a ring of them)."""
    seen = {name}
    while (name := links.get(name, "")) and name in links and name not in seen:
        seen.add(name)
    return name
