"""Memory behind fences: what is wrong ends at the place where it happens, and what is right goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from tests import guarded

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
SIZE = 100_000
BEGIN = f"""
import ctypes, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.calloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
at = libc.malloc({SIZE})
byte = ctypes.c_ubyte.from_address
"""
WRONG = {
    "past its end": f"byte(at + {SIZE} + 64).value",
    "after it was freed": "libc.free(at); libc.malloc(1); byte(at).value = 1",
    "in another thread": "libc.free(at); threading.Thread(target=lambda: byte(at).value).start()",
    "freed twice": "libc.free(at); libc.free(at)",
}
RIGHT = f"""
assert byte(at).value == byte(at + {SIZE} - 1).value == 0xA5, "fresh memory is not 0"
byte(at).value = 7
larger = libc.realloc(at, {4 * SIZE})
assert byte(larger).value == 7
small = libc.realloc(larger, 100)
assert byte(small).value == 7
libc.free(small)
import numpy
assert not numpy.zeros(1 << 20).any()
print("whole")
"""


def ended(tmp_path, program):
    env = guarded.environment(tmp_path)
    command = [sys.executable, "-c", BEGIN + program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("what", WRONG)
def test_memory_that_is_not_there_is_not_touched(tmp_path, what):
    done = ended(tmp_path, WRONG[what])
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "Segmentation fault" in done.stderr and 'File "<string>"' in done.stderr


def test_all_other_memory_is_as_usual(tmp_path):
    done = ended(tmp_path, RIGHT)
    assert done.returncode == 0 and done.stdout == "whole\n", done.stderr
