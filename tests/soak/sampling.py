"""What a job holds of its machine while it runs, sampled from outside, and whether it grows."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

EVERY_S = 5.0
ALLOWED = 0.02
ALLOWED_MIB = 4.0
"""What may be added from the second quarter to the last: a share, or of memory and files so much. Ray's
servers write 8 MB of logs an hour, and hold little enough that 2% of it is a few pages."""


def size_mib(folder: Path) -> float:
    """Size of a folder's files, whatever vanishes meanwhile left out."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total / 2**20


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
            for process in map(psutil.Process, filter(psutil.pid_exists, pids)):
                with contextlib.suppress(psutil.Error):  # it ends meanwhile
                    descriptors += process.num_fds()
                    resident += process.memory_info().rss
            if resident:
                self.series[f"rss_mib {name}"].append((now, resident / 2**20))
                self.series[f"descriptors {name}"].append((now, descriptors))
        for name, folder in self.folders.items():
            self.series[name].append((now, size_mib(folder)))

    def stop(self) -> None:
        self.done.set()
        self.join()

    def growth(self, start: float, stop: float) -> dict[str, dict[str, Any]]:
        """Medians of the second and the last quarter of a span of time, of everything that was there in
        both."""
        quarter = (stop - start) / 4
        grown = {}
        for name, points in sorted(self.series.items()):
            second = [v for t, v in points if start + quarter <= t < start + 2 * quarter]
            last = [v for t, v in points if start + 3 * quarter <= t < stop]
            if second and last:
                a, b = statistics.median(second), statistics.median(last)
                flat = b <= a + max(a * ALLOWED, ALLOWED_MIB if "mib" in name else 0)
                quarters = {"second_quarter": round(a, 2), "last_quarter": round(b, 2)}
                grown[name] = quarters | {"samples": len(second), "flat": flat}
        return grown
