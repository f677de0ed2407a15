"""A real training job as a process tree that can be watched, stopped and killed at a chosen moment.

All its processes carry one environment variable of their own, so that killing and looking for what is left
over never touches anything else on the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer import config as configuration
from trainer.config import RunConfig
from trainer.config.run_folder import read_lines, read_progress
from trainer.observe.history import reproducible_part

ROOT = Path(__file__).parents[2]
MARK = "SPOTRL_TEST_JOB"

REWARD = '''
def reward(text, reference, answer_type):
    """Varies among the completions of an untrained model, so that every step has a gradient."""
    return (sum(map(ord, text)) % 17) / 17
'''


class Job:
    """`python -m trainer.loops.grpo --config run.yaml` (or another module), with a Ray of its own."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        env: Mapping[str, str] | None = None,
        module: str = "trainer.loops.grpo",
        *,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
    ):
        """before, after: further words of the command line."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.run_dir = Path(config.run.dir)
        self.module = module
        self.path, self.log = folder / "run.yaml", folder / "job.log"
        self.path.write_text(configuration.dump(config))
        self.mark = uuid.uuid4().hex
        own = {"PYTHONPATH": str(ROOT), MARK: self.mark, "SPOTRL_METADATA": "off"}
        own["RAY_worker_niceness"] = "0"  # Ray's 15 starves the ranks as soon as another test computes
        self.env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | dict(env or {}) | own
        self.before, self.after = before, after
        self.process: subprocess.Popen | None = None
        self.started = 0.0
        self._known: list[int] = []

    def start(self) -> Job:
        """Starts it, or starts it again."""
        command = [*self.before, sys.executable, "-m", self.module, "--config", str(self.path), *self.after]
        self.started = time.time()
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def pids(self) -> list[int]:
        """Every living process of this job, whoever its parent is now."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def left_over(self) -> list[int]:
        """Processes that are still there 20 s after the job's end: the watcher of its driver's end needs a
        moment."""
        deadline = time.monotonic() + 20
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the job."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Ends everything at once with SIGKILL, as when the node vanishes."""
        self.signal(signal.SIGSTOP)
        while self.pids():
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        if self.process is not None:
            self.process.wait()

    def wait(self, timeout_s: float = 600.0) -> int:
        """Exit code of the driver. Raises AssertionError with the log's end after the timeout."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s:.0f} s\n{self.tail()}") from None

    def tail(self, characters: int = 4000) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def until(self, condition: Callable[[], object], timeout_s: float = 600.0, poll_s: float = 0.002) -> None:
        """Waits for a condition. Raises AssertionError with the log's end if the job ends first, or too
        late."""
        assert self.process is not None
        end, looked = time.monotonic() + timeout_s, 0.0
        while not condition():
            if time.monotonic() > looked + 5:
                self._known, looked = self.pids(), time.monotonic()
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"did not happen within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(poll_s)

    def frozen(self, condition: Callable[[], object]) -> bool:
        """Stops all processes and says whether the condition holds still; if not, lets them continue."""
        for pid in self._known:  # looking for them takes longer than some moments last
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self.signal(signal.SIGSTOP)
        if condition():
            return True
        self.signal(signal.SIGCONT)
        return False

    def progress(self) -> dict:
        """What the job shows of itself; empty until this start has shown anything."""
        state = read_progress(self.run_dir)
        return state if state.get("started_unix_s", 0) >= self.started else {}

    def in_phase(self, phase: str, step: int) -> bool:
        """Whether it is in this phase of this step or a later one."""
        state = self.progress()
        return state.get("phase") == phase and state.get("step", 0) >= step

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl without times and figures of the machine."""
        return [reproducible_part(line) for line in read_lines(self.run_dir / "metrics.jsonl")]
