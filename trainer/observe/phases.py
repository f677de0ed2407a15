"""Which phase each lane of a run is in, and how long each phase took. Standard library only. A lane is work
that goes on one piece after the other: a run whose ranks sample and learn in turns has one, a run that
samples on other machines meanwhile has two."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.run_folder import LEARNING, PROGRESS, SAMPLING, write_whole
from trainer.observe.history import column
from trainer.system import processes

PHASES = ("rollout", "grade", "wait", "update", "sync", "checkpoint", "eval")
"""Phases of a step, in the order in which a step runs them."""
OF_SAMPLING = ("rollout", "grade")
"""Phases of the sampling lane, if a run has one; the others belong to the learning lane."""


class Lane:
    """The clock of one lane, of one thread at a time. A phase inside another one pauses the outer: no second
    is counted twice."""

    def __init__(self, changed: Callable[[], None], on_boundary: Callable[[str], Any] | None = None) -> None:
        """changed: called whenever `state` has changed. on_boundary: called with its name after every
        outermost phase that ended well; what it raises stops the loop (a preemption notice)."""
        self._changed = changed
        self._on_boundary = on_boundary
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._taken = False
        self._began = time.monotonic()
        self._mark = self._began
        now = time.time()
        self.state: dict[str, Any] = {"step": 0, "phase": "start"}
        self.state |= dict.fromkeys(("phase_since_unix_s", "step_since_unix_s"), now)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Times the body as phase `name`; its metric is `time/{name}_s`."""
        self._charge()
        self._stack.append(name)
        self.show(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()
            self.show(self._stack[-1] if self._stack else "between")
        if not self._stack and self._on_boundary:
            self._on_boundary(name)

    def begin(self, step: int) -> None:
        """Says that step `step` begins (1 is the first). The clock of the first one starts here; that of a
        later one where the last `take` ended, so that what comes between logging and the next step, such as a
        checkpoint, is that step's."""
        if not self._taken:
            self._seconds = {}
            self._began = time.monotonic()
        self.state = self.state | {"step": step, "step_since_unix_s": time.time()}
        self._changed()

    def take(self, whole: str = "step") -> dict[str, float]:
        """Seconds per phase since the last call, and of everything as `time/{whole}_s`; starts again."""
        self._charge()
        now = time.monotonic()
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        taken[f"time/{whole}_s"] = now - self._began
        self._seconds = {}
        self._began = now
        self._taken = True
        return taken

    def show(self, phase: str) -> None:
        """Says which phase runs, without timing it."""
        self.state = self.state | {"phase": phase, "phase_since_unix_s": time.time()}
        self._changed()

    def _charge(self) -> None:
        now = time.monotonic()
        if self._stack:
            self._seconds[self._stack[-1]] = self._seconds.get(self._stack[-1], 0.0) + now - self._mark
        self._mark = now


class Phases(Lane):
    """The lanes of a run, told to other processes by `progress.json`. It is the learning lane, which every
    run has; `lane` opens another one.

        phases.begin(step, total)
        with phases("update"): ...
        metrics.log(step, phases.take())
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        on_boundary: Callable[[str], Any] | None = None,
        total_steps: int = 0,
    ) -> None:
        """run_dir: where `progress.json` goes (None: nowhere). total_steps: 0 where it is not known."""
        super().__init__(self._write, on_boundary)
        self._path = Path(run_dir) / PROGRESS if run_dir else None
        self._writing = threading.Lock()
        self._of_run: dict[str, Any] = {"status": "running", "total_steps": total_steps}
        self._of_run |= {"started_unix_s": time.time()} | processes.own_stamp()
        self._others: dict[str, Lane] = {}
        self._write()

    def lane(self, name: str) -> Lane:
        """Opens a further lane, for a thread of its own."""
        lane = Lane(self._write)
        self._others[name] = lane
        self._write()
        return lane

    def begin(self, step: int, total_steps: int | None = None) -> None:
        """Says that the learning lane begins step `step`; what `note` said of the start is over."""
        self._of_run["message"] = ""
        if total_steps is not None:
            self._of_run["total_steps"] = total_steps
        super().begin(step)

    def note(self, **fields: Any) -> None:
        """Puts more into `progress.json`; a `message`, such as "loading the model", lasts until a step
        begins."""
        self._of_run |= fields
        self._write()

    def sampled(self) -> None:
        """Says that engines on other machines have sampled something: a phase that waits for them makes
        progress. A full disk is met by the run's own phases, and not by the thread that hears of samples."""
        with contextlib.suppress(OSError):
            self.note(sampled_unix_s=time.time())

    def finish(self, status: str = "finished") -> None:
        """Says how the run ended: finished, preempted, interrupted or failed."""
        self._others = {}
        self._of_run["status"] = status
        self.show(status)

    def _write(self) -> None:
        if not self._path:
            return
        with self._writing:
            content = self._of_run | self.state
            if self._others:
                lanes = {LEARNING: self} | self._others
                content["lanes"] = {name: lane.state for name, lane in lanes.items()}
            write_whole(self._path, json.dumps(content | {"updated_unix_s": time.time()}).encode())


# --- a start --------------------------------------------------------------------------------------------

STARTED_VARIABLE = "SPOTRL_STARTED"
"""Variable that gives the driver the time (unix, s) at which the launcher began this attempt."""


class StartClock:
    """Times the parts of a start, from the launcher's first line to the first step: the cost of a
    preemption."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        """Starts at the launcher's time, or now without a launcher."""
        self._began = self._last = float(env.get(STARTED_VARIABLE) or time.time())
        self.parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """Ends a part: launch, place, load, resume or sync."""
        now = time.time()
        self.parts[part] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds of the whole start and of every part."""
        seconds = {f"perf/start_{part}_s": of_part for part, of_part in self.parts.items()}
        return {"perf/start_s": self._last - self._began} | seconds

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready {self._last - self._began:.1f} s after the launch: {parts}"


# --- read back from the metrics -------------------------------------------------------------------------


def mean_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, float]]]:
    """Mean seconds per step of each phase, by lane; the lane's name is empty where the run has one. `other`
    is what no phase of the lane covers. Records without a step's time are passed over."""
    timed = [record for record in history if "time/step_s" in record]
    if not timed:
        return {}
    whole = f"time/{SAMPLING}_s"
    if whole not in timed[-1]:
        return {"": _means(timed, PHASES, "time/step_s")}
    both = [record for record in timed if whole in record]
    learning = [name for name in PHASES if name not in OF_SAMPLING]
    return {
        LEARNING: _means(both, learning, "time/step_s"),
        SAMPLING: _means(both, OF_SAMPLING, whole),
    }


def _means(
    records: Sequence[Mapping[str, Any]], phases: Sequence[str], whole: str
) -> list[tuple[str, float]]:
    means = []
    for phase in phases:
        seconds = column(records, f"time/{phase}_s")
        if seconds:
            means.append((phase, sum(seconds) / len(records)))
    known = sum(seconds for _, seconds in means)
    rest = sum(column(records, whole)) / len(records) - known
    if rest > 0:
        means.append(("other", rest))
    return means
