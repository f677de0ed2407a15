"""Detects a job that makes no progress while all processes and connections are alive, and names the rank at
fault.

The head's launcher compares the current phase with its usual duration. Every launcher makes its ranks write
their stacks; the rank at fault is the one that has not entered the collective in which the others wait.
"""

from __future__ import annotations

import base64
import contextlib
import os
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config.run_folder import LaneProgress, lane_progress, read_progress
from trainer.observe import beacon
from trainer.observe.history import SLOWED, read_history
from trainer.observe.node_monitor import Stragglers
from trainer.system import processes
from trainer.system.last_words import innermost_frame
from trainer.system.server_waits import AGAIN_S, FOLDER_VARIABLE

LOOK_S = 1.0
CLOCK_SET_S = 5.0
"""A clock that moved further than this against the machine's uptime was set."""
IDLE = "in main_loop"
"""Where a Ray actor is between two calls."""
HOT = 6
"""Samples in a row in which a GPU is slowed down before that is said: one minute."""
STEPS = 20
"""Last steps whose median duration a phase is compared with."""
STACKS_S = 3.0
"""Longest wait for the stacks."""
TRACE_S = 5.0
"""Longest wait for NCCL's flight recorder, whose thread looks at its pipe about once a second."""
DUMPED_S = 2 * (STACKS_S + TRACE_S)
"""Longest wait for the other nodes' dumps."""
TRACE_BYTES = 4 << 20
"""Largest trace, compressed, that a node sends to the head; 2,000 entries are well under it."""
MOVING = ("start", "resume", "checkpoint", "export")
"""Phases that mostly read and write files: that is progress, however long a large model takes."""
ASKS_ENGINES = ("rollout", "wait", "sync", "eval")
"""Phases in which completions are waited for."""
SAMPLES = ("rollout", "wait", "eval")
"""Those in which nothing else is done: where engines on other machines sample, there is progress."""
GRADES = ("grade", "eval")
"""Phases in which a reward server or a judge is waited for. Their clients end the run by themselves."""
WAIT = "wait"
"""The phase of a lane that waits for the other one."""
MOVES = 1e6
"""Bytes per second, of the ranks and the driver of any node, that count as progress."""


@dataclass(frozen=True)
class HangingRank:
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
    trace: str = ""
    """NCCL's flight recorder: its file, compressed, in base64."""

    @property
    def place(self) -> str:
        """Where its main thread is."""
        return innermost_frame(self.stacks)


class Watchdog:
    """Reads the run's progress file and the nodes' samples; part of the head's launcher."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._looked = 0.0
        self._born = time.time()
        self._offset = time.time() - time.monotonic()
        self._reported = set[LaneProgress]()
        self._pieces = dict[int, int]()
        self._worked = 0.0
        self._moved = 0.0
        self._stragglers = Stragglers()
        self._gpus = dict[int, int]()
        self._hot = dict[tuple[int, int], int]()
        self._waited = dict[str, float]()
        """When a node last said that it waits for a server, by what the server does."""
        self._servers = dict[tuple[int, str], float]()
        """When a person was last told of a node's wait for a server; 0: not yet."""

    def look(self, sample: Mapping[str, Any]) -> list[str]:
        """Takes in a node's sample; returns lines: ranks that straggle, GPUs that are slowed down or gone."""
        if sample["bytes_per_s"].get("files", 0) >= MOVES:
            self._moved = time.time()
        if sample["pieces"] != self._pieces.get(sample["node"], 0):
            self._pieces[sample["node"]] = sample["pieces"]
            self._worked = time.time()
        for wait in sample.get("waits", ()):
            self._waited[wait["kind"]] = time.time()

        warning = self._stragglers.look(sample)
        warnings = filter(None, (warning, *self._of_gpus(sample)))
        return [*self._of_servers(sample), *(f"warning: {text}" for text in warnings)]

    def _of_servers(self, sample: Mapping[str, Any]) -> Iterator[str]:
        """Which servers a node waits for, once in a while, and which have answered since."""
        node = sample["node"]
        now = time.monotonic()
        waits = {wait["what"]: wait["tell"] for wait in sample.get("waits", ())}
        for server, line in waits.items():
            shown_s = self._servers.setdefault((node, server), 0.0)
            if line and (not shown_s or now - shown_s > AGAIN_S):
                self._servers[node, server] = now
                yield line
        for key in [key for key in self._servers if key[0] == node and key[1] not in waits]:
            if self._servers.pop(key):
                yield f"the wait for {key[1]} is over"

    def _of_gpus(self, sample: Mapping[str, Any]) -> Iterator[str]:
        node = sample["node"]
        gpus = sample.get("gpus", ())
        if len(gpus) < self._gpus.get(node, 0):
            answer = f"{len(gpus)} of {self._gpus[node]} GPUs on node {node} answer"
            yield f"{answer}: look for an Xid in its kernel log"
        self._gpus[node] = len(gpus)
        for gpu in gpus:
            key = node, gpu["gpu"]
            self._hot[key] = self._hot.get(key, 0) + 1 if gpu["slowdown"] & SLOWED else 0
            if self._hot[key] == HOT:
                which = f"GPU {gpu['gpu']} on node {node}"
                yield f"{which} is slowed down by heat or power, at {gpu['temperature_c']} C"

    def overdue(self) -> str:
        """The lane whose phase makes no progress, once per phase, else "". Checks once a second."""
        watch = self.config.watch
        if watch.on_hang == "off" or time.monotonic() - self._looked < LOOK_S:
            return ""
        self._looked = time.monotonic()
        self._follow_the_clock()
        state = read_progress(self.config.run.dir)
        if state.get("status") != "running" or state["started_unix_s"] < self._born:
            return ""
        running = lane_progress(state)
        at_work = [lane for lane in running if lane.phase != WAIT]
        # While one lane is at work, the other one may wait for it; two that wait for each other hang.
        for lane in at_work or running:
            if line := self._overdue(lane, state.get("sampled_unix_s", 0.0)):
                return line
        return ""

    def _follow_the_clock(self) -> None:
        """Measures a phase under way anew where this machine's clock was set: by an hour forward it would
        hang, by an hour back it could hang for an hour."""
        offset = time.time() - time.monotonic()
        moved_s = offset - self._offset
        if abs(moved_s) < CLOCK_SET_S:
            return
        self._offset = offset
        self._born += min(moved_s, 0.0)
        self._moved = 0.0
        self._waited.clear()
        self._worked = time.time()

    def _overdue(self, lane: LaneProgress, sampled_unix_s: float) -> str:
        """The line about a lane's phase, once. sampled_unix_s: when rollout workers made progress."""
        now = time.time()
        sampled = sampled_unix_s if lane.phase in SAMPLES and sampled_unix_s < now + CLOCK_SET_S else 0.0
        moved = self._moved if lane.phase in MOVING else 0.0
        began = lane.since_unix_s if lane.since_unix_s < now + CLOCK_SET_S else 0.0
        served = 0.0
        if lane.phase in GRADES:
            served = self._waited.get("grading", 0.0)
        if lane.phase in MOVING or (self.config.fleet.workers != "off" and lane.phase in ASKS_ENGINES):
            served = max(served, self._waited.get("storing", 0.0))
        since = now - max(began, self._worked, moved, sampled, served)
        limit = self.limit_s(lane.phase)
        if since <= limit or lane in self._reported:
            return ""
        self._reported.add(lane)
        where = f"phase {lane.phase} of step {lane.step}"
        if lane.name:
            where += f" ({lane.name})"
        return f"no progress in {where} for {since:.0f} s (limit {limit:.0f})"

    def limit_s(self, phase: str) -> float:
        """Seconds that a phase may take: a multiple of its median, or a fixed limit."""
        watch = self.config.watch
        if phase == "start":
            return watch.start_s
        # Samples of a fleet may have to wait until a worker is there; the driver ends by itself after that.
        fleet_s = 0.0
        if self.config.fleet.workers != "off" and phase in ASKS_ENGINES:
            fleet_s = self.config.fleet.wait_s + watch.floor_s
        metric = f"time/{phase}_s"
        times = [record[metric] for record in read_history(self.config.run.dir) if metric in record]
        if not times:
            return max(watch.first_s, fleet_s)
        return max(watch.floor_s, fleet_s, watch.factor * statistics.median(times[-STEPS:]))


def watchdog_variables(folder: Path) -> dict[str, str]:
    """Environment variables that let the ranks report where they are."""
    folder.mkdir(exist_ok=True)
    return {
        FOLDER_VARIABLE: str(folder),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "nccl_pipe_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl_trace_"),
    }


def dump_stacks(folder: Path, node: int) -> list[dict[str, Any]]:
    """Has this node's ranks write their stacks, and NCCL its flight recorder; returns where each rank is."""
    beacons = beacon.read_beacons(folder)
    stacks = {b.rank: folder / f"rank-{b.rank}-{b.pid}.stacks" for b in beacons}
    for pid in (*(b.pid for b in beacons), *_drivers(folder)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, beacon.SIGNAL)
    traces = _traces(folder)
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and not all(p.stat().st_size for p in stacks.values()):
        time.sleep(0.05)
    time.sleep(0.1)
    ranks: list[dict[str, Any]] = []
    for b in beacons:
        ends = processes.process_state(b.pid), stacks[b.rank].read_text(), traces.get(b.rank, "")
        ranks.append(asdict(HangingRank(node, b.rank, b.calls, b.inside, b.since_s, b.name, *ends)))
    return ranks


def _traces(folder: Path) -> dict[int, str]:
    """NCCL's flight recorder by rank: torch writes it when asked through its pipe."""
    paths = []
    for pipe in folder.glob("nccl_pipe_*.pipe"):
        trace = folder / f"nccl_trace_{pipe.stem.removeprefix('nccl_pipe_')}"
        trace.unlink(missing_ok=True)  # an earlier one
        with contextlib.suppress(OSError):
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"1\n")
            os.close(descriptor)
            paths.append(trace)
    sizes = [-1]
    deadline = time.monotonic() + TRACE_S
    while paths and time.monotonic() < deadline:
        before = sizes
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if sizes == before and all(sizes):
            break
        time.sleep(0.3)
    traces = {}
    for path in paths:
        packed = zlib.compress(path.read_bytes()) if path.exists() else b""
        if packed and len(packed) <= TRACE_BYTES:
            traces[int(path.name.removeprefix("nccl_trace_"))] = base64.b64encode(packed).decode()
    return traces


def _drivers(folder: Path) -> dict[int, Path]:
    """Stacks of the job's driver, on the head; of those that were started, the one that lives."""
    drivers = {int(path.stem.removeprefix("driver-")): path for path in folder.glob("driver-*.stacks")}
    return {pid: path for pid, path in drivers.items() if not processes.has_ended(pid)}


def report_hang(folder: Path, ranks: Sequence[HangingRank], why: str, run_dir: str | Path) -> str:
    """Writes all stacks into the run's folder; returns the line with who is at fault. folder: the head's."""
    driver = "".join(path.read_text() for path in _drivers(folder).values())
    line = f"{why}: {name_guilty_rank(sorted(ranks, key=lambda r: r.rank), innermost_frame(driver))}"
    out = write_stacks(ranks, line, run_dir)
    if driver:
        (out / "driver.txt").write_text(f"{line}\n\n{driver}")
    return f"{line} (all stacks: {out})"


def write_stacks(ranks: Sequence[HangingRank], why: str, run_dir: str | Path) -> Path:
    """Everything that was found of the ranks, in a folder of the run."""
    folder = Path(run_dir) / f"hang-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    folder.mkdir(parents=True, exist_ok=True)
    for r in ranks:
        calls = f"{r.calls} collectives, last {r.name}"
        head = f"{why}\nrank {r.rank}, node {r.node}, state {r.state or 'gone'}: {calls}\n\n"
        (folder / f"rank-{r.rank}.txt").write_text(head + r.stacks)
        if r.trace:
            (folder / f"nccl_trace_{r.rank}").write_bytes(zlib.decompress(base64.b64decode(r.trace)))
    return folder


def name_guilty_rank(ranks: Sequence[HangingRank], driver: str = "") -> str:
    """One line that names the rank at fault. driver: where the job's driver is, if known."""
    if driver and all(r.state in ("R", "S") and r.place.endswith(IDLE) for r in ranks):
        return f"no rank is at work: the driver is at {driver}"
    if not ranks:
        return "no rank reported where it is"
    for r in ranks:
        if r.state in ("", "Z", "T", "t"):
            fault = "is stopped (state T)" if r.state in ("T", "t") else "is gone"
            return f"rank {r.rank} on node {r.node} {fault}" + _waiting(ranks, [r])

    most = max(r.calls for r in ranks)
    ahead = [r for r in ranks if r.calls == most]
    late = [r for r in ranks if r.calls < most]
    outside = [r for r in ranks if not r.inside]
    # Where all have called as often, those that have not entered the last one are behind.
    behind = late or outside
    if behind and len(behind) < len(ranks):
        worst = min(behind, key=lambda r: r.calls)
        place = f"; it is at {worst.place}" if worst.place else ""
        called = next((r.name for r in ahead if r is not worst), "")
        fault = f"rank {worst.rank} on node {worst.node} has not entered {called} (collective {most}){place}"
        return fault + _waiting(ranks, behind)

    if len({r.name for r in ahead}) > 1:
        which = ", ".join(f"rank {r.rank} {r.name}" for r in ahead)
        return f"the ranks are in different collectives ({which}): they do not run the same program"
    if not outside:
        where = f"{ahead[0].name} (collective {most})"
        return f"all ranks are in {where}: the network between them, or a GPU, hangs"
    places = "; ".join(f"rank {r.rank} at {r.place or '?'}" for r in ranks[:8])
    return f"all ranks are outside of collectives: {places}"


def _waiting(ranks: Sequence[HangingRank], at_fault: Sequence[HangingRank]) -> str:
    """The first rank that waits for those at fault, and where; empty without one."""
    for r in ranks:
        if r.inside and r not in at_fault:
            return f"; rank {r.rank} waits for it in {r.name} since {r.since_s:.0f} s"
    return ""
