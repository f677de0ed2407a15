"""Shells that the tests of a node run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bash(code: str, env: Mapping[str, str], folder: Path = ROOT) -> tuple[int, str]:
    """(exit code, output and errors) of a strict shell that runs `code` in a folder with `env` alone."""
    command = ["bash", "-c", f"set -euo pipefail\n{code}\n"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def program(path: Path, script: str) -> Path:
    """Makes a program that is a script of bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path
