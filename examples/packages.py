"""Packages that an example needs, installed by their hashes into a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.system.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def uv_program() -> str:
    """Where uv is. Raises ConfigError if it is nowhere."""
    found = [shutil.which("uv"), str(Path.home() / ".local/bin/uv"), str(ROOT / ".cache/uv/bin/uv")]
    for path in found:
        if path and os.access(path, os.X_OK):
            return path
    raise ConfigError("uv is missing: `pip install uv`")


def install_requirements(requirements: Path, folder: Path, what: str) -> None:
    """Installs a hashed requirements file into a folder, beside the environment's own packages.

    what: what a person is told is fetched. Raises ConfigError if it cannot be.
    """
    uv = uv_program()
    print(f"fetching {what}", file=sys.stderr, flush=True)
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder)]
    done = subprocess.run([*command, "--no-deps", "--require-hashes", "-r", str(requirements)])
    if done.returncode:
        raise ConfigError(f"{what} could not be fetched: uv's message is above")
