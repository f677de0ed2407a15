"""Runs Python that a model wrote, in a process of its own (trainer/system/answering_process.py).

Every program runs in a child that is locked up (sandbox.py) and knows nothing of earlier ones.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import math
import os
import random
import select
import signal
import sys
import time
from functools import partial

from trainer.system.errors import ConfigError
from trainer.system.process_set import MAX_STRETCH, waited_for_cpu_s
from trainer.system.processes import end_with_parent
from trainer.turns.sandbox import NoSandbox, lock_up

MODULES = (
    "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re",
    "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
"""What programs can import: nothing is read from a disk in the child."""
MEMORY_BYTES = 512 << 20
OUTPUT_BYTES = 4000
"""Bytes of what a program prints; the rest is cut off."""
CUT = "\n... (the rest of the output is cut off)"
LONGEST = 20_000
"""Characters of a program."""
TRIAL = "import os\ntry:\n    os.open('/', 0)\nexcept PermissionError:\n    print('locked')"
"""A program that shows whether the child is locked up."""


def run_program(program: str, seconds: float) -> dict[str, str]:
    """{"text": what a program printed} or {"wrong": what was wrong with it}. Raises NoSandbox."""
    reads, writes = os.pipe()
    fault_reads, fault_writes = os.pipe()
    child = os.fork()
    if not child:
        _child(program, writes, fault_writes, os.getppid(), seconds)
    os.close(writes)
    os.close(fault_writes)
    started = time.monotonic()
    printed = b""
    try:
        while len(printed) <= OUTPUT_BYTES:
            elapsed = time.monotonic() - started
            left = seconds - elapsed + waited_for_cpu_s(child)
            if left <= 0 or elapsed > MAX_STRETCH * seconds:
                return {"wrong": f"the program took longer than {seconds:g} seconds"}
            if select.select([reads], [], [], min(left, 0.25))[0]:
                piece = os.read(reads, OUTPUT_BYTES + 1)
                if not piece:
                    break
                printed += piece
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        fault = os.read(fault_reads, OUTPUT_BYTES)
        os.close(fault_reads)
    if fault:
        raise NoSandbox(fault.decode(errors="replace"))
    text = printed[:OUTPUT_BYTES].decode(errors="ignore")
    if len(printed) > OUTPUT_BYTES:
        return {"text": text + CUT}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGKILL,):
        return {"wrong": "the program crashed"}
    return {"text": text or "(the program printed nothing)"}


def _child(program: str, out: int, fault: int, parent: int, seconds: float) -> None:
    """What runs in the child; it does not return. fault: what takes the reason why it cannot be locked up,
    closed before the program runs."""
    code = 1
    with contextlib.suppress(BaseException):
        end_with_parent(parent)
        os.dup2(fault, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.closerange(3, 65536)
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", "replace")
        try:
            lock_up(MEMORY_BYTES, math.ceil(seconds) + 1)
        except Exception as error:
            os.write(0, str(error).encode())
            os._exit(code)
        os.close(0)
        _seed(program)
        _execute(program)
        sys.stdout.flush()
        code = 0
    os._exit(code)


def _seed(program: str) -> None:
    """Makes random numbers a function of the program, those of a generator without a seed, too."""
    own = int.from_bytes(hashlib.sha256(program.encode(errors="replace")).digest()[:8], "big")
    usual = random.Random.seed

    def seed(self: random.Random, a: int | float | str | bytes | None = None, version: int = 2) -> None:
        usual(self, own if a is None else a, version)

    random.Random.seed = seed  # ty: ignore[invalid-assignment]
    random.seed = partial(seed, random._inst)  # ty: ignore[invalid-assignment]
    random.seed()


def _execute(program: str) -> None:
    """Runs a program; prints the value of an expression at its end, and what it raised."""
    names = {"__name__": "__main__"}
    try:
        tree = ast.parse(program, "program")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "program", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
            if value is not None:
                print(value if isinstance(value, str) else repr(value))
    except BaseException as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{_line(error)}")


def _line(error: BaseException) -> str:
    """Where a program failed; a SyntaxError says it by itself."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


class Programs:
    """An `Answerer` of programs."""

    def __init__(self, seconds: str) -> None:
        """seconds: for one program. Raises ConfigError where it cannot be locked up."""
        self.seconds = float(seconds)
        self.about: dict[str, str] = {}
        for name in MODULES:
            __import__(name)
        sys.setrecursionlimit(1000)
        try:
            trial = run_program(TRIAL, 60.0)
            fault = "" if trial == {"text": "locked\n"} else f"a program was not locked up: {trial}"
        except NoSandbox as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"turns.environment python: {fault}; use another machine, or another environment"
            )

    def answer(self, message: bytes) -> bytes:
        """`Answerer.answer`."""
        return json.dumps(run_program(message.decode(), self.seconds)).encode()
