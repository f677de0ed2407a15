"""What a job holds of its machine while it runs, sampled from outside, and whether it grows."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.loops.jobs import Job

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


class Sampler(threading.Thread):
    """Samples memory and descriptors of every process of a job, /dev/shm, Ray's folder and the run's."""

    def __init__(self, job: Job, ray: Path) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.ray = ray
        self.done = threading.Event()
        self.series: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def run(self) -> None:
        while not self.done.wait(EVERY_S):
            self.sample()

    def sample(self) -> None:
        now = time.time()
        for pid in self.job.pids():
            folder = Path(f"/proc/{pid}")
            try:
                words = command(pid).split()
                resident = int((folder / "statm").read_text().split()[1]) * PAGE_KIB / 1024
                descriptors = len(list((folder / "fd").iterdir()))
            except (OSError, IndexError):
                continue
            name = f"{Path(words[0]).name if words else '?'} {pid}"
            self.series[f"rss_mib {name}"].append((now, resident))
            self.series[f"descriptors {name}"].append((now, descriptors))
        self.series["shm_mib"].append((now, size_mib([Path("/dev/shm")])))
        self.series["ray_mib"].append((now, size_mib([self.ray])))
        self.series["run_mib"].append((now, size_mib([self.job.run_dir])))

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
