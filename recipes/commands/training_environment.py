"""Commands that run in a training environment: `launch.py data` and `launch.py test`."""

from __future__ import annotations

import os
import subprocess
import sys

WITHIN = "--within=20"
"""Seconds that a test of the first half may take."""


def run_in_training_environment(what: str, arguments: list[str]) -> int:
    """Commands that need the training environment: data (but not its help), test."""
    if what == "data" and (not arguments or {"-h", "--help"} & set(arguments)):
        return subprocess.run([sys.executable, "-m", "data_prep", *(arguments or ["--help"])]).returncode
    environment = "test" if what == "test" else "cpu"
    code = subprocess.run(["bash", "trainer/shell/setup.sh", environment]).returncode
    if code:
        return code
    command = [f".venvs/{environment}/bin/python", "-m", "data_prep" if what == "data" else "pytest"]
    # All tests: first those of one process, then those that bring ranks and servers of their own.
    parts = [arguments]
    if what == "test" and not arguments:
        parts = [["--fast", WITHIN], ["--rest", WITHIN]]
    # Tests start hundreds of processes: what one has compiled, the others read.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return max((subprocess.run([*command, *part], env=env).returncode for part in parts), key=abs)
