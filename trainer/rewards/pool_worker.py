"""The processes that grade. Started by `pool.py` as `python -m trainer.rewards.pool_worker FD [USER_FUNCTION]`.

The process started is a nursery: it imports math-verify once, then forks a worker for each request over its control
socket, and kills workers by request (it alone reaps them, so a process id can never be another's). A worker answers one
task at a time over its own socket. When the trainer dies, even by SIGKILL, the nursery sees end-of-file and goes; when
the nursery goes, the kernel kills its workers (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of a worker: a tower of powers gets MemoryError, the node does not."""
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")

UserFunction = Callable[[str, str, str], Any]


def send(connection: socket.socket, message: Any) -> None:
    """Sends one JSON message with its length before it."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receives one message. Raises EOFError if the other side is gone."""
    return json.loads(exactly(connection, _LENGTH.unpack(exactly(connection, _LENGTH.size))[0]))


def exactly(connection: socket.socket, size: int) -> bytes:
    """Receives this many bytes. Raises EOFError if the other side is gone."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other process is gone")
        data += piece
    return bytes(data)


def load_function(spec: str) -> UserFunction:
    """Loads `path/to/file.py:function`. Raises ValueError saying what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"rewards.function {spec!r}: write path/to/file.py:function, with a file that exists")
    module_spec = importlib.util.spec_from_file_location("user_reward", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"rewards.function: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"rewards.function: {path} has no function {name!r}")
    return function


def grade_task(task: list[str], function: UserFunction | None) -> list[Any]:
    """Runs one task and returns [verdict or message, number].

    Tasks: ["grade", box, gold, answer type], ["gold", gold, answer type], ["user", text, gold, answer type].
    """
    from trainer.rewards.grading import grader

    match task:
        case ["grade", content, gold, answer_type]:
            verdict = grader.decide(content, gold, answer_type)  # ty: ignore[invalid-argument-type]
            return [verdict, float(verdict == "correct")]
        case ["gold", gold, answer_type]:
            return [grader.gold_error(gold, answer_type), 0.0]  # ty: ignore[invalid-argument-type]
        case ["user", text, gold, answer_type] if function is not None:
            value = float(function(text, gold, answer_type))
            return ["correct" if value > 0 else "wrong", value] if math.isfinite(value) else ["error", 0.0]
    raise ValueError(f"unknown task {task[0]!r}")


def _work(connection: socket.socket, user_function: str) -> None:
    """A worker's life: ready, then a task, its result, the next."""
    function = None
    try:
        function = load_function(user_function) if user_function else None
    except BaseException as error:
        send(connection, ["failed", f"{type(error).__name__}: {error}"])
        return
    if function is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    send(connection, ["ready", ""])
    while True:
        task = receive(connection)
        try:
            result = grade_task(task, function)
        except RecursionError:
            result = ["wrong", 0.0] if task[0] == "grade" else ["error", 0.0]
        except Exception as error:
            print(f"grading {task[1][:200]!r} failed: {type(error).__name__}: {error}", file=sys.stderr)
            result = ["error", 0.0]
        send(connection, result)


def _fork(control: socket.socket, connection: socket.socket, user_function: str) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)
        control.close()
        _work(connection, user_function)
    except (EOFError, OSError):
        pass
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(0)


def nursery(control: socket.socket, user_function: str) -> None:
    """Forks and kills workers by request until the trainer is gone.

    Requests of one byte and eight: F with a socket attached answers with the new worker's pid; K with a pid.
    """
    parent = os.getppid()
    children: set[int] = set()
    control.settimeout(1.0)
    control.sendall(b"R")
    while os.getppid() == parent:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)
        try:
            request, fds, _, _ = socket.recv_fds(control, 9, 1)
        except TimeoutError:
            continue
        if not request:
            return
        pid = struct.unpack("!q", request[1:])[0]
        if request[:1] == b"F":
            with socket.socket(fileno=fds[0]) as connection:
                connection.setblocking(True)
                child = _fork(control, connection, user_function)
            children.add(child)
            control.sendall(struct.pack("!q", child))
        elif pid in children:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Entry of the nursery."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    user_function = sys.argv[2] if len(sys.argv) > 2 else ""
    if not user_function:
        from trainer.rewards.grading import symbolic

        symbolic.preload()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        nursery(control, user_function)


if __name__ == "__main__":
    main()
