"""What a job holds of its machine while it runs, sampled from outside, and whether it grows."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

EVERY_S = 5.0
ALLOWED = 0.02
ALLOWED_MIB = 4.0
"""What may be added from the second quarter to the last: a share, or of memory and files so much. Ray's
servers write 8 MB of logs an hour, and hold little enough that 2% of it is a few pages."""
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def size_mib(paths: Iterable[Path]) -> float:
    """Size of the files of folders, whatever vanishes meanwhile left out."""
    total = 0
    for folder in paths:
        for root, _, names in os.walk(folder):
            for name in names:
                try:
                    total += os.lstat(os.path.join(root, name)).st_blocks * 512
                except OSError:
                    continue
    return total / 2**20


def command(pid: int) -> str:
    """Its command line; nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def by_command(pids: Iterable[int]) -> dict[str, list[int]]:
    """Each process under the name of its program and its number."""
    return {f"{Path((command(pid).split() or '?')[0]).name} {pid}": [pid] for pid in pids}


class Sampler(threading.Thread):
    """Samples memory and descriptors of processes, and the size of folders."""

    def __init__(
        self, processes: Callable[[], Mapping[str, Sequence[int]]], folders: Mapping[str, Path]
    ) -> None:
        """processes: those that are there, by name. folders: by the name of their series."""
        super().__init__(daemon=True)
        self.processes, self.folders = processes, folders
        self.done = threading.Event()
        self.series: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def run(self) -> None:
        while not self.done.wait(EVERY_S):
            self.sample()

    def sample(self) -> None:
        now = time.time()
        for name, pids in self.processes().items():
            resident = descriptors = 0
            for pid in pids:
                folder = Path(f"/proc/{pid}")
                with contextlib.suppress(OSError, IndexError):  # it ends meanwhile
                    descriptors += len(list((folder / "fd").iterdir()))
                    resident += int((folder / "statm").read_text().split()[1])
            if resident:
                self.series[f"rss_mib {name}"].append((now, resident * PAGE_KIB / 1024))
                self.series[f"descriptors {name}"].append((now, descriptors))
        for name, folder in self.folders.items():
            self.series[name].append((now, size_mib([folder])))

    def stop(self) -> None:
        self.done.set()
        self.join()

    def growth(self, start: float, stop: float) -> dict[str, dict[str, Any]]:
        """Medians of the second and the last quarter of a span of time, of everything that was there in
        both."""
        quarter, found = (stop - start) / 4, {}
        for name, points in sorted(self.series.items()):
            second = [v for t, v in points if start + quarter <= t < start + 2 * quarter]
            last = [v for t, v in points if start + 3 * quarter <= t < stop]
            if second and last:
                a, b = statistics.median(second), statistics.median(last)
                found[name] = {
                    "second_quarter": round(a, 2),
                    "last_quarter": round(b, 2),
                    "samples": len(second),
                }
                found[name]["flat"] = b <= a + max(a * ALLOWED, ALLOWED_MIB if "mib" in name else 0)
        return found
