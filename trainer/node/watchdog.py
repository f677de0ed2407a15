"""Detects a job that makes no progress while all processes and connections are alive, and names the rank at fault.

The head's launcher compares the current phase with its usual duration. Every launcher makes its ranks write their
stacks; the rank at fault is the one that has not entered the collective in which the others wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.observe import beacon
from trainer.observe.history import read_history, read_progress

LOOK_S = 1.0
STEPS = 20
"""Last steps whose median duration a phase is compared with."""
STACKS_S = 3.0
"""Longest wait for the stacks."""


@dataclass(frozen=True)
class Rank:
    """Where one rank is, when the job hangs."""

    node: int
    rank: int
    calls: int
    inside: bool
    since_s: float
    name: str
    state: str
    """As in /proc: R, S, D, T; empty where the process is gone."""
    stacks: str

    @property
    def place(self) -> str:
        """The innermost Python frame of the main thread, which is written last."""
        threads = re.split(r"\n\n|\n(?=Thread |Current thread )", self.stacks.strip())
        frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1]) if threads else None
        return f"{Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else ""


class Watchdog:
    """Reads the run's progress file; part of the head's launcher."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self._looked, self._born = config, 0.0, time.time()
        self._told: tuple[Any, ...] = ()

    def overdue(self) -> str:
        """The phase that makes no progress, once per phase, else "". Checks once a second."""
        watch = self.config.watch
        if watch.on_hang == "off" or time.monotonic() - self._looked < LOOK_S:
            return ""
        self._looked = time.monotonic()
        state = read_progress(self.config.run.dir)
        if state.get("status") != "running" or state["started_unix_s"] < self._born:
            return ""
        phase, since = state["phase"], time.time() - state["phase_since_unix_s"]
        limit = self.limit_s(phase)
        key = (phase, state["step"], state["phase_since_unix_s"])
        if since <= limit or key == self._told:
            return ""
        self._told = key
        return f"no progress in phase {phase} of step {state['step']} for {since:.0f} s (limit {limit:.0f})"

    def limit_s(self, phase: str) -> float:
        """Seconds that a phase may take: a multiple of its median, or the limit of a phase that never ended before."""
        watch = self.config.watch
        if phase == "start":
            return watch.start_s
        times = [r[f"time/{phase}_s"] for r in read_history(self.config.run.dir) if f"time/{phase}_s" in r][-STEPS:]
        if not times:
            return watch.first_s
        return max(watch.floor_s, watch.factor * statistics.median(times))


def variables(folder: Path) -> dict[str, str]:
    """Environment variables that let the ranks report where they are."""
    folder.mkdir(exist_ok=True)
    return {
        beacon.FOLDER_VARIABLE: str(folder),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "nccl_pipe_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl_trace_"),
    }


def dump(folder: Path, node: int) -> list[dict[str, Any]]:
    """Makes this node's ranks write their stacks (and NCCL its flight recorder); returns where each rank is."""
    found = beacon.read(folder)
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, beacon.SIGNAL)
    for pipe in folder.glob("nccl_pipe_*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"1\n")
            os.close(descriptor)
    deadline = time.monotonic() + STACKS_S
    stacks = {b.rank: folder / f"rank-{b.rank}-{b.pid}.stacks" for b in found}
    while time.monotonic() < deadline and not all(p.stat().st_size for p in stacks.values()):
        time.sleep(0.05)
    time.sleep(0.1)
    return [
        asdict(Rank(node, b.rank, b.calls, b.inside, b.since_s, b.name, _state(b.pid), stacks[b.rank].read_text()))
        for b in found
    ]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def write(ranks: Sequence[Rank], why: str, run_dir: str | Path) -> Path:
    """Everything that was found, in a folder of the run."""
    folder = Path(run_dir) / f"hang-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    folder.mkdir(parents=True, exist_ok=True)
    for r in ranks:
        head = (
            f"{why}\nrank {r.rank}, node {r.node}, state {r.state or 'gone'}: {r.calls} collectives, last {r.name}\n\n"
        )
        (folder / f"rank-{r.rank}.txt").write_text(head + r.stacks)
    return folder


def guilty(ranks: Sequence[Rank]) -> str:
    """One line that names the rank at fault, from where all ranks are."""
    if not ranks:
        return "no rank reported where it is"
    for r in ranks:
        if r.state in ("", "Z", "T", "t"):
            what = "is stopped (state T)" if r.state in ("T", "t") else "is gone"
            return f"rank {r.rank} on node {r.node} {what}" + _waiting([o for o in ranks if o is not r])
    most = max(r.calls for r in ranks)
    ahead = [r for r in ranks if r.calls == most]
    behind = [r for r in ranks if r.calls < most] or [r for r in ranks if not r.inside]
    if behind and len(behind) < len(ranks):
        worst = min(behind, key=lambda r: r.calls)
        place = f"; it is at {worst.place}" if worst.place else ""
        called = next((r.name for r in ahead if r is not worst), "")
        return f"rank {worst.rank} on node {worst.node} has not entered {called} (collective {most}){place}" + _waiting(
            [r for r in ranks if r not in behind]
        )
    names = {r.name for r in ahead}
    if len(names) > 1:
        which = ", ".join(f"rank {r.rank} {r.name}" for r in ahead)
        return f"the ranks are in different collectives ({which}): they do not run the same program"
    if all(r.inside for r in ranks):
        return f"all ranks are in {ahead[0].name} (collective {most}): the network between them, or a GPU, hangs"
    return "all ranks are outside of collectives: " + "; ".join(f"rank {r.rank} at {r.place or '?'}" for r in ranks[:8])


def _waiting(others: Sequence[Rank]) -> str:
    inside = [r for r in others if r.inside]
    return f"; rank {inside[0].rank} waits for it in {inside[0].name} since {inside[0].since_s:.0f} s" if inside else ""
