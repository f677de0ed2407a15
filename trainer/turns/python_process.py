"""Runs Python that a model wrote: `python -m trainer.turns.python_process FD PARENT SECONDS`.

Every program runs in a child that is locked up (sandbox.py) and knows nothing of earlier ones.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection

from trainer.system.guarded_process import waited_for_cpu_s
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
NO_SANDBOX = "\0no sandbox: "
"""What a child says first that could not be locked up."""
LONGEST = 20_000
"""Characters of a program."""
TRIAL = "import os\ntry:\n    os.open('/', 0)\nexcept PermissionError:\n    print('locked')"
"""A program that shows whether the child is locked up."""


def run_program(program: str, seconds: float) -> dict[str, str]:
    """{"text": what a program printed} or {"wrong": what was wrong with it}. Raises NoSandbox."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        _child(program, writes, os.getppid(), seconds)
    os.close(writes)
    started = time.monotonic()
    printed = b""
    try:
        while len(printed) <= OUTPUT_BYTES:
            left = seconds - (time.monotonic() - started) + waited_for_cpu_s(child)
            if left <= 0:
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
    text = printed[:OUTPUT_BYTES].decode(errors="ignore")
    if len(printed) > OUTPUT_BYTES:
        return {"text": text + CUT}
    if text.startswith(NO_SANDBOX):
        raise NoSandbox(text.removeprefix(NO_SANDBOX))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGKILL,):
        return {"wrong": "the program crashed"}
    return {"text": text or "(the program printed nothing)"}


def _child(program: str, out: int, parent: int, seconds: float) -> None:
    """What runs in the child; it does not return."""
    code = 1
    with contextlib.suppress(BaseException):
        end_with_parent(parent)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(0)
        os.closerange(3, 65536)
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", "replace")
        try:
            lock_up(MEMORY_BYTES, math.ceil(seconds) + 1)
        except Exception as error:
            print(f"{NO_SANDBOX}{error}", end="", flush=True)
            os._exit(code)
        _execute(program)
        sys.stdout.flush()
        code = 0
    os._exit(code)


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


def serve(connection: Connection, seconds: float) -> None:
    """Sends ["ready", about] or ["failed", why], then runs programs until the rank closes the connection."""
    for name in MODULES:
        __import__(name)
    sys.setrecursionlimit(1000)
    try:
        trial = run_program(TRIAL, 60.0)
        fault = "" if trial == {"text": "locked\n"} else f"a program was not locked up: {trial}"
    except NoSandbox as error:
        fault = str(error)
    if fault:
        said = f"turns.environment python: {fault}; use another machine, or another environment"
        connection.send_bytes(json.dumps(["failed", said]).encode())
        return
    connection.send_bytes(json.dumps(["ready", {"pid": os.getpid()}]).encode())
    while True:
        program = connection.recv_bytes().decode()
        connection.send_bytes(json.dumps(run_program(program, seconds)).encode())


def main() -> None:
    descriptor, parent, seconds = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(parent))
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(descriptor)), float(seconds))


if __name__ == "__main__":
    main()
