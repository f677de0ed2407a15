"""Ranks for tests: forked from one process that has imported what a rank imports, which alone takes 17 s of
CPU.

Started by `Ranks` with the environment that all ranks get, it reads a line of JSON for each scenario, forks
its ranks, waits for them and replies with their exit codes. One that fails or is late ends the others.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = "tests.learning.scenarios"


class Ranks:
    """The process that forks; it ends with the tests."""

    def __init__(self, env: dict[str, str]):
        command = [sys.executable, "-m", "tests.learning.ranks"]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdin=pipe, stdout=pipe, text=True
        )

    def run(self, scenario: str, config: Path, port: int, outs: list[Path], timeout_s: float) -> list[int]:
        """Exit codes of one rank for each of `outs`; what a rank prints is in a .log beside its result.

        After an exception, a test's timeout for one, the process has ended: its reply would be read as the
        next one's.
        """
        assert self.process.stdin and self.process.stdout
        order = {"scenario": scenario, "config": str(config), "port": port, "outs": list(map(str, outs))}
        try:
            self.process.stdin.write(json.dumps(order | {"timeout_s": timeout_s}) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        """Ends the process, and with it its ranks."""
        self.process.kill()
        self.process.wait()


def fork(order: dict[str, Any], rank: int) -> int:
    """Process id of a new rank."""
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent()
        out = Path(order["outs"][rank])
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        importlib.import_module(SCENARIOS).run(
            order["scenario"], Path(order["config"]), rank, order["port"], out
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # `scenarios.run` does not return


def wait(pids: list[int], timeout_s: float) -> list[int]:
    """Exit codes; -9 for those that had to be killed."""
    codes, end = dict.fromkeys(pids), time.monotonic() + timeout_s
    while None in codes.values():
        for pid in [p for p, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > end:
            for pid in [p for p, code in codes.items() if code is None]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return list(codes.values())  # ty: ignore[invalid-return-type]


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # a GPU's driver does not survive a fork
        for module in (
            "deepspeed",
            "vllm.v1.worker.cpu_worker",
            "vllm.model_executor.models.qwen2_5_vl",
            SCENARIOS,
        ):
            importlib.import_module(module)
        from vllm import LLM  # noqa: F401
    for line in sys.stdin:
        order = json.loads(line)
        codes = wait([fork(order, rank) for rank in range(len(order["outs"]))], order["timeout_s"])
        print(json.dumps(codes), file=replies, flush=True)


if __name__ == "__main__":
    main()
