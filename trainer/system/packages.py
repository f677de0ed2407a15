"""Packages that only some runs need: installed by their hashes into a folder of their own, when first asked
for."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.system.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


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


def package_folder(requirements: Path, what: str) -> Path:
    """Folder with the packages of a requirements file, in `.venvs`. They are installed if they are missing.

    Processes that ask at once take turns. Raises ConfigError if they cannot be fetched.
    """
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = ROOT / ".venvs" / f"{requirements.stem}-{version}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            scratch = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(scratch, ignore_errors=True)
            install_requirements(requirements, scratch, what)
            os.replace(scratch, folder)
    return folder
