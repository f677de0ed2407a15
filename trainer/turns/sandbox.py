"""Locks a process up for good: from then on it can compute, write to files that are open, and end.

Linux's seccomp refuses every other call of the kernel: no file is opened, no connection made, no process
started or signaled. It needs no rights and no tool of the system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct

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
