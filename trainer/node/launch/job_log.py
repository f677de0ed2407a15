"""The job's log as it grows: kept with the run, and copied to standard output without live display."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path

from trainer.config.growing_file import GrowingFile
from trainer.config.run_folder import LAUNCH_LOG
from trainer.system.redaction import without_secrets

ERROR = "error: "
"""Begins the line in which a loop says why it ended (trainer/loops/process.py)."""
RAYS_OWN = re.compile(r"^(Running entrypoint for job |.*job_manager\.py:\d+ -- Runtime env is setting up)")
"""Lines that Ray's job agent adds before the job's own."""
OUTCOMES = ("resumed from step ", "warning: ", "guards: ", "weights: ", "report: ")
"""Beginnings of the job's lines that a person needs after a live display, which shows none."""


class JobLog:
    """Copies new lines of the job's log to the run's `launch.log`, and with `show` to standard output."""

    def __init__(self, source: Path, run_dir: Path, show: bool):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.source = GrowingFile(source)
        self.show = show
        self._copy = (run_dir / LAUNCH_LOG).open("a", encoding="utf-8")
        self._last: deque[str] = deque(maxlen=20)
        self.outcomes: list[str] = []
        """Lines for a person at the end, where `show` is off; each once."""

    def pump(self, last: bool = False) -> None:
        """Takes what is new; `last` also the line that is not finished."""
        new = self.source.read()
        if last:
            new += self.source.rest()
        *lines, unfinished = new.split(b"\n")
        if unfinished:
            lines.append(unfinished)
        for raw in lines:
            line = without_secrets(raw.decode(errors="replace"))
            if RAYS_OWN.match(line):
                continue
            self._last.append(line)
            self._copy.write(line + "\n")
            if self.show:
                print(line, flush=True)
            elif line.startswith(OUTCOMES) and line not in self.outcomes:
                self.outcomes.append(line)
        self._copy.flush()

    def tail(self) -> str:
        return "\n".join(self._last)

    def reason(self) -> str:
        """What the job said last about its end; "" where it said nothing."""
        for line in reversed(self._last):
            if line.startswith(ERROR):
                return line.removeprefix(ERROR)
        return ""

    def close(self) -> None:
        self.pump(last=True)
        self._copy.close()
        sys.stdout.flush()
