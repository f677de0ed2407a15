"""What a process that died left: signal and stacks in its log, or a count in its kernel."""

from __future__ import annotations

import re
from pathlib import Path

SEE = "See docs/failures.md"
SIGNAL = re.compile(r"^(?:\*\*\* )?(SIG[A-Z]+)(?: received at|\(\d+\), PID)", re.MULTILINE)
"""How Ray's and torch's handlers begin what they write of a fatal signal."""
FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
THROWN = re.compile(r"^  what\(\):\s+(.+)$", re.MULTILINE)
"""A C++ exception that nothing caught."""
FRAME = re.compile(r"^(?:frame #\d+: |\s+@\s+0x\w+\s+\S+\s+)((?:at|c10|torch|c10d)::[\w:]+)", re.MULTILINE)
"""A function of torch in a C++ stack of theirs."""
HANDLERS = ("c10::FatalSignalHandler", "c10::function_ref")
"""Functions of torch that say nothing about where it was."""
TAIL_BYTES = 256 << 10


def innermost_frame(stacks: str) -> str:
    """The innermost Python frame in what faulthandler wrote: the current thread's, if that was Python's, or
    else the main thread's, which comes last."""
    threads = re.split(r"\n\n|\n(?=Thread |Current thread )", stacks.strip())
    current = [thread for thread in threads if thread.startswith("Current thread")]
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', (current or threads)[-1])
    return f"{Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else ""


def cause_in_log(log: str) -> str:
    """The cause of a death in one line, from the process's log; "" where the log has none."""
    signal, fatal, thrown = (pattern.search(log) for pattern in (SIGNAL, FATAL, THROWN))
    if not signal and not fatal:
        return ""
    cause = signal[1] if signal else fatal[1] if fatal else ""
    if thrown:
        cause += f" after {thrown[1][:200]}"
    functions = [name for name in FRAME.findall(log) if not name.startswith(HANDLERS)]
    if functions:
        cause += f" in {functions[0]}"
    python = log[fatal.end() :].partition("\n\nExtension modules")[0] if fatal else ""
    place = innermost_frame(python)
    return f"{cause}, called at {place}" if place else cause


def memory_kills() -> int | None:
    """Processes that the kernel has killed for memory since it started; None where it does not tell."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def cause_outside_log(before: int | None) -> str:
    """Why a process may have died whose log has no cause. before: `memory_kills` at its start."""
    now = memory_kills()
    if before is None or now is None:
        return f"killed from outside, perhaps out of memory, which its kernel does not tell. {SEE}"
    if now > before:
        return f"out of memory: its machine's kernel has killed {now - before} processes for that. {SEE}"
    return f"killed from outside, and not for memory: its machine's kernel has killed nothing for that. {SEE}"


def describe_death(log: str, before: int | None) -> tuple[str, str]:
    """The cause of a death in one line, and the log's end. before: as in `cause_outside_log`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, Path(log).stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        text = f"its log cannot be read: {error}"
    return cause_in_log(text) or cause_outside_log(before), text
