"""What a job holds of the host's memory, beside neighbors."""

from __future__ import annotations

import subprocess
import sys

from tests.gpu.job_memory import children_bytes

MIB = 2**20
HOLDS = "import mmap, sys; a = bytearray(b'x') * ({mib} << 20); print(flush=True); sys.stdin.read()"
SHARES = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
child = os.fork()
shared[:: 4096]
if child:
    print(flush=True)
sys.stdin.read()
"""


def start(code: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def test_children_count_and_a_neighbor_does_not():
    before = children_bytes()
    ours = start(HOLDS.format(mib=96))
    neighbor = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid"
    # A child of a process that has ended belongs to the system, as a neighbor's does.
    with subprocess.Popen(
        [sys.executable, "-c", neighbor, HOLDS.format(mib=200)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        held = (children_bytes() - before) / MIB
    end(ours)
    assert 96 <= held < 130


def test_memory_that_processes_share_counts_once():
    before = children_bytes()
    ours = start(SHARES)
    held = (children_bytes() - before) / MIB
    end(ours)
    assert 64 <= held < 100
