"""Runs a command with large memory behind fences: `python -m tests.guarded COMMAND...`

Whoever touches memory past its end, or after it was freed, ends at once with SIGSEGV and a stack
(guarded.c): a tensor operation in a thread too, which an address sanitizer would not see in libraries that it
did not compile. Ranks that Ray starts inherit it. Needs gcc.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process with fences; the library is compiled into `folder`."""
    library = folder / "guarded.so"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", str(SOURCE), "-ldl"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return os.environ | {"LD_PRELOAD": str(library), "PYTHONFAULTHANDLER": "1"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(subprocess.run(sys.argv[1:], env=environment(Path(made))).returncode)
