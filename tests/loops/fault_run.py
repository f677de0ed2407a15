"""A run with engines of its own and the kills that strike it: in which moment, and whether its node's disk
goes too. However often it is started again, it ends with the metrics and weights of the run that nothing
struck."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.loops.jobs import Job
from trainer.config import RunConfig


def placed(config: RunConfig, folder: Path, **checkpoint) -> RunConfig:
    """The run in a folder of its own."""
    return replace(
        config,
        run=replace(config.run, dir=str(folder / "run")),
        checkpoint=replace(config.checkpoint, **checkpoint),
    )


def weights_of(job: Job) -> str:
    """sha256 of the exported weights, or adapter."""
    (exported,) = (job.run_dir / "hf").glob("*.safetensors")
    return hashlib.sha256(exported.read_bytes()).hexdigest()


def nothing_before(run: FaultRun) -> None:
    """The network is as ever."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of all processes at once."""

    moment: Callable[[FaultRun], object]
    """Whether it strikes now; all processes stand still until this is certain."""
    fresh: bool = False
    """Whether the next start is on a node without the run's folder."""
    before: Callable[[FaultRun], None] = nothing_before
    """What is prepared before the start that it ends."""
    check: Callable[[FaultRun], None] = nothing_before
    """What must be seen behind it, before the node's disk goes. Raises AssertionError."""


def in_phase(phase: str, step: int, fresh: bool = False, **more) -> Kill:
    """In a phase of this step or a later one."""
    return Kill(lambda run: run.job.in_phase(phase, step), fresh, **more)


def in_save(step: int) -> Kill:
    """While the checkpoint of this step is written."""
    return Kill(lambda run: any(run.job.run_dir.glob(f"checkpoints/step-{step:08d}/.rank-*.partial")))


class FaultRun:
    """A job that is started again after each kill."""

    def __init__(self, config: RunConfig, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.job = Job(config, folder, env)
        self.folder = folder

    def play(self, kills: Sequence[Kill], undisturbed: Job, floor: int = 0) -> None:
        """Kills the run in each of these moments, then lets it end. floor: the step that the first start must
        reach, so that there is something committed. Raises AssertionError where the run is not the
        undisturbed one, or anything is left over."""
        job = self.job
        for kill in kills:
            kill.before(self)
            self._strike(kill, floor)
            floor = max(
                floor and 1, job.progress().get("step", 0) - 2
            )  # lost: the step, and a commit cut off
            kill.check(self)
            if kill.fresh:
                shutil.rmtree(job.run_dir)
        assert job.start().wait(900) == 0, job.tail()
        begun = self.began_at()
        assert len(begun) == len(kills) + 1 and begun[-1] > 0
        for kill, before, after in zip(kills, begun, begun[1:], strict=False):
            # A disk that went with its node takes along what the store had not got yet.
            assert kill.fresh or after >= before, "a resume went back behind the one before"
        self.is_like(undisturbed)

    def is_like(self, undisturbed: Job) -> None:
        """Raises AssertionError where the run that ended is not that other one, or anything is left over."""
        assert self.job.metrics() == undisturbed.metrics()
        assert weights_of(self.job) == weights_of(undisturbed)
        assert self.job.left_over() == []
        assert not list(self.job.run_dir.rglob("*.partial"))

    def began_at(self) -> list[int]:
        """The step that each start resumed from; 0 where it began from scratch."""
        log = self.job.log.read_text()
        found = re.findall(r"^(?:resumed from step (\d+)|starting from scratch)$", log, re.MULTILINE)
        return [int(step or 0) for step in found]

    def _strike(self, kill: Kill, floor: int) -> None:
        job = self.job.start()
        job.until(lambda: job.progress().get("step", 0) >= floor and job.progress().get("phase") != "resume")
        job.until(lambda: kill.moment(self) and job.frozen(lambda: kill.moment(self)))
        job.kill()
        state = job.progress()
        print(f"killed in {state.get('phase')} of step {state.get('step')}")
