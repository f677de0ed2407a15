"""Commands that run in an environment of their own: `launch.py data` and `launch.py test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WITHIN = "--within=20"
"""Seconds that a test of the first half may take."""
AGAIN = 3
"""Tests of a half that may fail beside others and pass alone: more than these are no accident."""
FAILED = 1
"""pytest's exit code: tests ran, and some failed."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest keeps the names of tests that failed."""


TEST_HELP = """usage: python3 launch.py test [--fast | --rest] [-m MARK] [any argument of pytest]

  (no arguments)       all that needs neither root nor a GPU, in two halves; failures are tried again alone
  --fast               minutes, on all cores: no engine, no Ray
  --rest               only what --fast leaves out
  --within=SECONDS     leaves out tests that take longer
  -m long              long fault drills and soaks
  -m lab               network namespaces, sshd, Slurm, SkyPilot and dstack servers (tests/lab/README.md)
  -m nullgpu           on a CUDA device that is not there (tests/nullgpu/README.md)
  --record-durations   renews tests/durations.json
  tests/FOLDER, -k, -x, ...   go to pytest as they are

The first run installs the locked test environment into .venvs/test (7.5 GB on the disk)."""


def prepare_data(arguments: list[str]) -> int:
    """Runs a command of `data` in a training environment that is here, or else in a small one, which lacks
    what reads a model's processor."""
    if not arguments or {"-h", "--help"} & set(arguments):
        return subprocess.run([sys.executable, "-m", "data_prep", *(arguments or ["--help"])]).returncode
    names = ("cpu", "test") if "--mask" in arguments else ("data", "cpu", "test")
    name = next((name for name in names if Path(f".venvs/{name}/.stamp").exists()), names[0])
    code = subprocess.run(["bash", "trainer/shell/setup.sh", name]).returncode
    return code or subprocess.run([f".venvs/{name}/bin/python", "-m", "data_prep", *arguments]).returncode


def run_tests(arguments: list[str]) -> int:
    """Runs pytest with these arguments; without any, all tests."""
    if {"-h", "--help"} & set(arguments):
        print(TEST_HELP)
        return 0
    code = subprocess.run(["bash", "trainer/shell/setup.sh", "test"]).returncode
    if code:
        return code
    python = ".venvs/test/bin/python"
    # Tests start hundreds of processes: what one has compiled, the others read.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if arguments:
        return subprocess.run([python, "-m", "pytest", *arguments], env=env).returncode
    # All tests: first those of one process, then those that bring ranks and servers of their own.
    halves = (["--fast", WITHIN], ["--rest", WITHIN])
    return max((run_half(python, half, env) for half in halves), key=abs)


def run_half(python: str, options: list[str], env: dict[str, str]) -> int:
    """One half of the tests. Up to `AGAIN` that fail are tried once more with no other test beside them: many
    watch the clock, and machines that run tests are shared. Those that pass then are named. Returns pytest's
    exit code."""
    LAST_FAILED.unlink(missing_ok=True)
    command = [python, "-m", "pytest", *options]
    code = subprocess.run(command, env=env).returncode
    failed = list(json.loads(LAST_FAILED.read_text())) if code == FAILED and LAST_FAILED.exists() else []
    # A whole file that failed could not be collected beside the others: no load explains that.
    if not 0 < len(failed) <= AGAIN or not all("::" in name for name in failed):
        return code
    print(f"\nonce more, alone: {', '.join(failed)}", flush=True)
    code = subprocess.run([*command, "-n0", "--last-failed"], env=env).returncode
    if code == 0:
        print(f"failed beside other tests and passed alone, mend them: {', '.join(failed)}", flush=True)
    return code
