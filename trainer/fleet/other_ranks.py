"""The ranks of a worker's engine beside the first: processes that rank 0 starts, and that end with it.

Rank 0 tells each of them by a line on its standard input what to do next. A collective that waits would end
after some minutes, and a worker may wait for its next unit for longer. Nothing comes back: a rank that cannot
go on ends, and then the worker does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import RunConfig
from trainer.exit_codes import EXIT_NODE_LOST
from trainer.processes import end_with_parent

ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of an engine are on one machine, whose network has no need to reach them."""


class OtherRanks:
    """Ranks 1 and above; none where an engine is one rank."""

    def __init__(self, config: RunConfig, lost: Callable[[str, int], None]) -> None:
        """lost: is told, from a thread, why a rank has ended, and the exit code for that. Call it in the main
        thread: the kernel ends a rank when the thread that started it is gone."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost = lost
        if config.rollout.tensor_parallel == 1:
            return
        os.environ |= ON_ONE_MACHINE
        path = Path(config.run.dir) / "worker.yaml"
        path.write_text(configuration.dump(config))
        for rank in range(1, config.rollout.tensor_parallel):
            self._start(rank, path)

    def _start(self, rank: int, path: Path) -> None:
        command = [sys.executable, "-m", "trainer.fleet.engine_rank", "--config", str(path)]
        process = subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdin=subprocess.PIPE,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        self._lost(f"rank {rank} of its engine has ended {how}", EXIT_NODE_LOST if code < 0 else code)

    def tell(self, **order: Any) -> None:
        """What every rank does next, with rank 0. Returns at once."""
        line = json.dumps(order).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its watcher says so
                process.stdin.write(line)
                process.stdin.flush()
