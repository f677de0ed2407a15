"""What a drill sees of its processes and of the bucket while it goes on: what must stay flat."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.storage.storage import Storage

EVERY_S = 5.0
"""Seconds between two looks."""
LONG_S = 120.0
"""A process that was watched for less says nothing of what stays flat."""
PARTS = 10
"""Equal parts of a process's life, and of the drill, of which the figures are means."""


@dataclass
class Sight:
    """Figures of the drill, one for each look."""

    store: Storage
    """The run's folder `fleet`."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """MiB in memory of each process (of a trainer, of all its processes), from when it is ready."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Their open files."""
    bucket: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Objects and bytes of each folder."""
    _at: float = 0.0

    def look(self, processes: Mapping[str, Sequence[int]]) -> None:
        """Takes in the processes that are ready, by name, and the bucket; not more often than is useful."""
        if time.monotonic() - self._at < EVERY_S:
            return
        self._at = time.monotonic()
        for name, pids in processes.items():
            pages = files = 0
            for pid in pids:
                with contextlib.suppress(OSError, ValueError):  # it ends meanwhile
                    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    files += len(os.listdir(f"/proc/{pid}/fd"))
                    pages += resident
            if pages:
                self.memory.setdefault(name, []).append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
                self.files.setdefault(name, []).append(files)
        with contextlib.suppress(Exception):  # the listing of a server that writes meanwhile
            seen: dict[str, tuple[int, int]] = {}
            for key, size in self.store.list():
                folder = key.partition("/")[0]
                objects, total = seen.get(folder, (0, 0))
                seen[folder] = objects + 1, total + size
            self.bucket.append(seen)

    def most_objects(self) -> dict[str, int]:
        """The most objects that each folder was seen with."""
        most: dict[str, int] = {}
        for seen in self.bucket:
            for folder, (objects, _) in seen.items():
                most[folder] = max(objects, most.get(folder, 0))
        return dict(sorted(most.items()))

    def figures(self) -> dict[str, Any]:
        """Means over equal parts: of every long life, and of the bucket over the whole drill."""
        lives = [name for name, values in self.memory.items() if len(values) * EVERY_S >= LONG_S]
        bucket = {}
        for folder in self.most_objects():
            found = [seen.get(folder, (0, 0)) for seen in self.bucket]
            objects, sizes = zip(*found, strict=True)
            bucket[folder] = {"objects": means(objects), "bytes": means(sizes)}
        processes = {}
        for name in lives:
            processes[name] = {
                "watched_s": round(len(self.memory[name]) * EVERY_S),
                "mib": means(self.memory[name]),
                "open_files": means(self.files[name]),
            }
        return {"processes": processes, "bucket": bucket}


def means(values: Sequence[float]) -> list[float]:
    """Means of equal parts of a series, in order."""
    bounds = [round(part * len(values) / PARTS) for part in range(PARTS + 1)]
    parts = [values[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    return [round(statistics.fmean(part), 1) for part in parts if part]
