"""The rollout workers of one machine: `python -m trainer.fleet.machine --config FILE`.

One worker for each engine, which is `rollout.tensor_parallel` of the machine's GPUs. A worker that fails is
started again within the run's budget (`checkpoint.max_restarts`). The machine is rented for the run alone, so
this process also looks by itself whether the run is over or silent: a worker that hangs by then is ended, and
nothing stays.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig
from trainer.config.run_store import RunStore
from trainer.config.schema import SHARED_BY
from trainer.fleet.run_follower import RunFollower
from trainer.hardware.visible_gpus import gpu_names, gpu_variable
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_PREEMPTED
from trainer.system.processes import end_with_parent
from trainer.system.terminal_text import terminal_line

LOOK_S = 15.0
"""Seconds between two looks at the run."""
LATE_S = 60.0
"""A worker that goes on for this long after its run is over is told to end."""
KILL_S = 30.0
"""A worker that was told to end has this long until it is killed."""
PAUSE_S = 10.0
"""Seconds until a worker that failed is started again; twice as many after each further time in a row."""
HEALTHY_S = 1800.0
"""After a worker has lived for this many seconds, its earlier failures no longer count."""
FINAL = (EXIT_OK, EXIT_CONFIG, EXIT_PREEMPTED)
"""Codes after which this machine starts no worker again."""


class WorkerOnMachine:
    def __init__(self, command: Sequence[str], env: dict[str, str], restarts: int) -> None:
        self._command, self._env = list(command), env
        self._restarts = restarts
        self._failures = 0
        self._again_at = 0.0
        self.code: int | None = None
        """The code that it ended with for good; None while it runs or will be started again."""
        self.start()

    def start(self) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            env=os.environ | self._env,
            preexec_fn=partial(
                end_with_parent, os.getpid()
            ),  # a machine's next start would find its GPUs taken
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def tend(self) -> None:
        """Looks whether it has ended, and starts it again where that is due."""
        if self.code is not None or self.running:
            return
        if self._again_at:
            if time.monotonic() >= self._again_at:
                self._again_at = 0.0
                self.start()
            return
        code = self.process.returncode
        if time.monotonic() - self._began > HEALTHY_S:
            self._failures = 0
        self._failures += 1
        if code in FINAL or self._failures > self._restarts:
            self.code = code
            return
        pause_s = PAUSE_S * 2 ** (self._failures - 1)
        print(
            f"machine: a worker ended with {code}; it is started again in {pause_s:.0f} s"
            f" ({self._failures} of {self._restarts} times, checkpoint.max_restarts)",
            flush=True,
        )
        self._again_at = time.monotonic() + pause_s

    def stop(self, number: int) -> None:
        """Sends a signal to its process, and starts it no more."""
        self._restarts = 0
        if self.running:
            self.process.send_signal(number)
        elif self.code is None:
            self.code = self.process.returncode


def tend_workers(
    engines: Sequence[WorkerOnMachine], over: Callable[[], str], most_s: float, look_s: float = LOOK_S
) -> int:
    """Tends the workers until all have ended; returns the exit code: that of the first that failed, else 0.
    over: why the run needs no worker any more; empty while it does. most_s: after which the machine ends."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    began = time.monotonic()
    looked = began
    end_at = kill_at = float("inf")
    why = ""
    while any(engine.code is None for engine in engines):
        now = time.monotonic()
        if signals:
            for engine in engines:
                engine.stop(signals[0])
            signals.clear()
            kill_at = min(kill_at, now + KILL_S)
        elif not why and now - looked > look_s:
            looked = now
            why = over()
            if not why and now - began > most_s:
                why = f"{most_s / 3600:g} hours are over (budget.max_hours)"
            end_at = now + LATE_S if why else end_at
        if now > end_at:
            print(f"machine: {terminal_line(why)}: its workers are ended", flush=True)
            signals.append(signal.SIGTERM)
            end_at = float("inf")
        if now > kill_at:
            signals.append(signal.SIGKILL)
        for engine in engines:
            engine.tend()
        time.sleep(0.1)
    if why:
        return EXIT_OK
    return next((_exit_code(engine.code) for engine in engines if engine.code), EXIT_OK)


def _exit_code(code: int) -> int:
    """A process's end as a shell's exit code: a signal has no other."""
    return code if code >= 0 else 128 - code


class RunOver:
    """Asks the bucket whether a run still needs workers."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError without a key."""
        store = RunStore.in_bucket(config.checkpoint.remote, config.fleet.run)
        self._following = RunFollower.of(store, config.fleet.run)
        self._idle_s = config.fleet.idle_s

    def __call__(self) -> str:
        try:
            self._following.look()
        except StorageError as error:  # a store that is away is silent, too
            print(f"machine: {error}", flush=True)
        if self._following.over:
            return f"the run is over: {self._following.over}"
        most_s = self._following.patience_s(self._idle_s)
        if self._following.silent_s() > most_s:
            return f"the trainer was silent for {most_s:.0f} s (fleet.idle_s)"
        return ""


def start_workers(config: RunConfig, command: Sequence[str]) -> list[WorkerOnMachine]:
    """Starts the workers of `placement`: one for every `rollout.tensor_parallel` of its ranks, each with as
    many GPUs of its own where there are any. Raises ConfigError where ranks are left over."""
    ranks, size = config.placement.workers_per_node, config.rollout.tensor_parallel
    if ranks % size:
        raise ConfigError(
            f"rollout.tensor_parallel {size} does not divide the {ranks} GPUs of this machine"
            f" (placement.workers_per_node): use a divisor of {ranks}, or machines of {size} GPUs"
        )
    shared = {SHARED_BY: os.environ.get(SHARED_BY, str(ranks))}
    envs = [dict(shared if config.placement.device == "cuda" else {}) for _ in range(ranks // size)]
    if config.placement.device == "cuda" and len(envs) > 1:
        names = gpu_names()
        cards = [str(i) for i in range(ranks)] if names is None else names
        if len(cards) < ranks:
            raise ConfigError(
                f"{gpu_variable()} names {len(cards)} GPUs, and placement.workers_per_node is {ranks}:"
                " name as many"
            )
        for number, env in enumerate(envs):
            env[gpu_variable()] = ",".join(cards[number * size : (number + 1) * size])
    return [WorkerOnMachine(command, env, config.checkpoint.max_restarts) for env in envs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML with fleet.run and checkpoint.remote")
    parser.add_argument("--hours", type=float, default=float("inf"), help="after which the machine ends")
    options = parser.parse_args()
    try:
        config = configuration.load(Path(options.config))
        over = RunOver(config)
        command = [sys.executable, "-m", "trainer.fleet.worker", "--config", options.config]
        engines = start_workers(config, command)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    return tend_workers(engines, over, 3600 * options.hours)


if __name__ == "__main__":
    sys.exit(main())
