"""A tool that runs Python programs of a model's, which can do nothing but compute. See docs/turns.md.

    --set turns.environment=examples/python_tool.py:Python --set turns.tool_seconds=10

Every program runs in a child that Linux's seccomp locks up for good: it can compute, write to files that are
open, and end; no file is opened, no connection made, no process started or signaled. It needs no rights and
no tool of the system. A program knows nothing of earlier ones. Start the run with PYTHONHASHSEED=0, so that
equal programs print the same.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import hashlib
import io
import math
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from trainer.system.process_set import MAX_STRETCH, waited_for_cpu_s
from trainer.system.processes import end_with_parent
from trainer.turns.calls import BadCallError, offered
from trainer.turns.episode import Situation

SECONDS = 2.0
"""For one program; `turns.tool_seconds`, which ends the process around it, should be longer."""
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


PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
OF_NUMBER = 0
"""Where a call's number stands in what a filter is given."""
OF_MACHINE = 4
"""Where the machine's kind stands."""
KILL = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
ALLOW = 0x7FFF0000
CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
        "brk": 12, "mremap": 25, "madvise": 28, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "sigaltstack": 131, "restart_syscall": 219, "sched_yield": 24, "nanosleep": 35,
        "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229, "gettimeofday": 96, "times": 100,
        "getrusage": 98, "getpid": 39, "gettid": 186, "futex": 202, "set_robust_list": 273, "rseq": 334,
        "getrandom": 318, "exit": 60, "exit_group": 231,
    },
    "aarch64": {
        "read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "mmap": 222, "mprotect": 226,
        "munmap": 215, "brk": 214, "mremap": 216, "madvise": 233, "rt_sigaction": 134, "rt_sigprocmask": 135,
        "rt_sigreturn": 139, "sigaltstack": 132, "restart_syscall": 128, "sched_yield": 124, "nanosleep": 101,
        "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "times": 153,
        "getrusage": 165, "getpid": 172, "gettid": 178, "futex": 98, "set_robust_list": 99, "rseq": 293,
        "getrandom": 278, "exit": 93, "exit_group": 94,
    },
}  # fmt: skip
"""Numbers of the calls that are allowed, by machine (the kernel's unistd tables)."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Kinds of machines as the kernel names them to a filter (AUDIT_ARCH of linux/audit.h)."""


class NoSandbox(Exception):
    """Why this machine cannot lock a process up."""


def lock_up(most_bytes: int, cpu_s: int) -> None:
    """Locks this process up. most_bytes: memory that it may take besides what it has. cpu_s: its CPU time.

    Raises NoSandbox, and OSError where a limit cannot be set.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise NoSandbox(f"there is no list of allowed calls for {machine}")
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + most_bytes, held + most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    steps = _filter(MACHINES[machine], list(CALLS[machine].values()))
    code = ctypes.create_string_buffer(b"".join(steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)):
        if libc.prctl(option, *arguments, 0, 0):
            raise NoSandbox(f"the kernel refuses seccomp: {os.strerror(ctypes.get_errno())}")


def _filter(machine: int, allowed: list[int]) -> list[bytes]:
    """A filter in the kernel's own code, of eight bytes a step: what it does, where it jumps, a number."""
    steps = [
        struct.pack("HBBI", LOAD_WORD, 0, 0, OF_MACHINE),
        struct.pack("HBBI", JUMP_IF_EQUAL, 1, 0, machine),
        struct.pack("HBBI", RETURN, 0, 0, KILL),
        struct.pack("HBBI", LOAD_WORD, 0, 0, OF_NUMBER),
    ]
    for i, number in enumerate(allowed):
        to_the_end = len(allowed) - i
        steps.append(struct.pack("HBBI", JUMP_IF_EQUAL, to_the_end, 0, number))
    steps.append(struct.pack("HBBI", RETURN, 0, 0, REFUSE))
    steps.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    return steps


class Python:
    """The tool."""

    tools: Sequence[dict[str, Any]] = (
        offered(
            "python",
            "Runs a Python program and returns what it prints, and the value of an expression at its end."
            f" It can import {', '.join(MODULES)}; it has no files and no network, and earlier programs leave"
            " nothing behind.",
            {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "For example: print(sum(range(10)))"}
                },
                "required": ["code"],
            },
        ),
    )

    def __init__(self) -> None:
        """Raises NoSandbox where a process cannot be locked up."""
        for name in MODULES:
            __import__(name)
        sys.setrecursionlimit(1000)
        trial = run_program(TRIAL, 60.0)
        if trial != {"text": "locked\n"}:
            raise NoSandbox(f"a program was not locked up: {trial}")

    def answer(self, situation: Situation, replies: Sequence[str]) -> str | None:
        """What the last reply's program prints."""
        call = situation.call(replies[-1])
        if call is None:
            return None
        code = call.arguments.get("code")
        if call.name != "python" or not isinstance(code, str):
            raise BadCallError('there is one tool, python, and its "code" is a text')
        if len(code) > LONGEST:
            raise BadCallError(f"the program is longer than {LONGEST} characters")
        said = run_program(code.encode(errors="replace").decode(), SECONDS)
        if "wrong" in said:
            raise BadCallError(said["wrong"])
        return said["text"]
