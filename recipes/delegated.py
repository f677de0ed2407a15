"""Commands of launch.py that another program answers: `data` (but not its help) and `test`, in the training
environment."""

from __future__ import annotations

import subprocess
import sys


def delegate(what: str, arguments: list[str]) -> int:
    """Makes the environment, then runs the program in it; returns its exit code."""
    if what == "data" and (not arguments or {"-h", "--help"} & set(arguments)):
        return subprocess.run([sys.executable, "-m", "data_prep", *(arguments or ["--help"])]).returncode
    environment = "test" if what == "test" else "cpu"
    code = subprocess.run(["bash", "trainer/setup.sh", environment]).returncode
    if code:
        return code
    command = [f".venvs/{environment}/bin/python", "-m", "data_prep" if what == "data" else "pytest"]
    # All tests: the quick ones on all cores, then those that bring processes of their own.
    parts = [["--fast"], ["--rest"]] if what == "test" and not arguments else [arguments]
    return max((subprocess.run([*command, *part]).returncode for part in parts), key=abs)
