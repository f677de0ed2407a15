"""Profiles one step: torch.profiler's trace of each call of each rank and, on CUDA, the allocator's history
(docs/failures.md). `logging.profile_step` names the step. While a run runs, a file in its folder asks for the
next one. Every rank writes on its own node and pushes its files to the bucket."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig
from trainer.config.run_store import RunStore
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

REQUEST = "profile.request"
"""File in the run's folder that asks for a profile of the next step."""
ALLOCATIONS = 100_000
"""Newest allocations and frees that a memory snapshot holds."""


@dataclass(frozen=True)
class RankProfile:
    """The files that one rank recorded."""

    files: int
    size_bytes: int
    failed: str = ""
    """Why the files are not in the bucket; empty if they are."""


class Recorder:
    """Records calls of one rank."""

    def __init__(self, config: RunConfig, step: int, rank: int) -> None:
        self.seconds = config.logging.profile_s
        self.cuda = config.placement.device == "cuda"
        name = f"step-{step:08d}"
        self.folder = Path(RunStore.at_run_folder(config).profiles) / name
        self.rank = rank
        self.calls = 0
        store = RunStore.of(config)
        self.url = f"{store.profiles}/{name}" if store else ""
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Records the body, or its first `logging.profile_s` seconds; writes the files once it has ended
        well."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        stem = str(self.folder / f"rank-{self.rank}-{self.calls:02d}-{name}")
        self.calls += 1
        activities = [ProfilerActivity.CPU]
        if self.cuda:
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        if self.cuda:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        recording.start()
        try:
            with _alarm(self.seconds, recording.stop) as stop:
                yield
                stop()
            recording.export_chrome_trace(f"{stem}.json.gz")
            if self.cuda:
                torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
        finally:
            if self.cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def push(self) -> RankProfile:
        """Pushes what was recorded. A store that fails costs the copy, never the run."""
        files = sorted(self.folder.glob(f"rank-{self.rank}-*"))
        failed = ""
        try:
            for path in files if self.url else ():
                Storage(self.url).put(path, path.name)
        except (StorageError, ConfigError, OSError) as error:
            failed = str(error)
        return RankProfile(len(files), sum(path.stat().st_size for path in files), failed)


@contextlib.contextmanager
def _alarm(seconds: float, action: Callable[[], None]) -> Generator[Callable[[], None]]:
    """Calls `action` once: when the seconds are over, or when the body calls what it is given, or with the
    body. By a signal, since a profiler must stop in the thread that it started in; in other threads the
    seconds do not count."""
    pending = [action]

    def once(*_: Any) -> None:
        if pending:
            pending.pop()()

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, once) if main else None
    if main:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield once
    finally:
        if main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        once()


class StepProfiles:
    """The driver's part: has the ranks record the step that is configured, or the next one after a
    request."""

    def __init__(
        self, config: RunConfig, record: Callable[[int], object], recorded: Callable[[], list[RankProfile]]
    ) -> None:
        """record: has every rank record the calls of a step. recorded: ends that and returns what each
        took."""
        self.config = config
        self.record = record
        self.recorded = recorded
        self.step = 0
        self.request = Path(config.run.dir) / REQUEST

    def begin(self, step: int) -> None:
        """Starts to record, if `step` is to be profiled."""
        requested = self.request.exists()
        if not requested and step != self.config.logging.profile_step:
            return
        self.request.unlink(missing_ok=True)
        self.step = step
        self.record(step)

    def end(self) -> None:
        """Ends the record after the step, and prints where the profile is."""
        if not self.step:
            return
        taken = self.recorded()
        folder = f"{RunStore.at_run_folder(self.config).profiles}/step-{self.step:08d}"
        size = max(t.size_bytes for t in taken) / 2**20
        memory = "" if self.config.placement.device == "cuda" else "; no memory snapshot: that is CUDA's"
        print(f"profile of step {self.step}: {folder}, up to {size:.1f} MiB a rank{memory}", flush=True)
        for failed in sorted({t.failed for t in taken} - {""}):
            print(f"warning: the profile did not reach the bucket: {failed}", flush=True)
        self.step = 0
