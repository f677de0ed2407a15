"""Holes in the heap go back to the kernel, once they are worth it; and threads share few heaps."""

import os
import subprocess
import sys

import pytest

from trainer.ranks.environment import rank_environment
from trainer.ranks.heap import ARENAS, SLACK_BYTES, Heap, resident_bytes


def holes() -> list[bytearray]:
    """Twice the slack in blocks too small for a mapping of their own, of which every eighth stays."""
    blocks = [bytearray(b"x" * (64 << 10)) for _ in range(SLACK_BYTES >> 15)]
    return blocks[::8]


def test_holes_are_given_back_when_they_are_worth_it():
    heap = Heap()
    heap.trim()
    before = resident_bytes()
    assert not heap.trim(), "nothing has grown"
    kept = holes()
    grown = resident_bytes()
    assert grown > before + SLACK_BYTES, "the C library keeps the pages"
    assert heap.trim() and resident_bytes() < grown - SLACK_BYTES
    assert all(block == b"x" * (64 << 10) for block in kept) and not heap.trim()


THREADS = """
import ctypes, sys, threading
c, barrier = ctypes.CDLL(None), threading.Barrier(6)
c.malloc.restype, c.fopen.restype = ctypes.c_void_p, ctypes.c_void_p

def hold():
    barrier.wait()
    c.malloc(100_000)
    barrier.wait()

threads = [threading.Thread(target=hold) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
out = ctypes.c_void_p(c.fopen(sys.argv[1].encode(), b"w"))
c.malloc_info(0, out)
c.fclose(out)
"""


@pytest.mark.parametrize("how", ["as Ray starts a worker", "by default"])
def test_threads_share_few_heaps(small_config, tmp_path, how):
    variables = {
        k: v for k, v in rank_environment(small_config).items() if k.startswith("MALLOC_") and "Ray" in how
    }
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    subprocess.run([sys.executable, "-c", THREADS, str(tmp_path / "info.xml")], env=env, check=True)
    heaps = (tmp_path / "info.xml").read_text().count("<heap nr=")
    assert heaps > 4 if how == "by default" else heaps <= ARENAS
