#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["click>=8.1", "msgspec>=0.20", "pyyaml>=6", "rich>=14"]
# ///
"""SpotRL's front door: `python3 launch.py COMMAND`, see `python3 launch.py --help`. The command line is
recipes/commands/cli.py.

Any Python from 3.9 on will do. Where this one is older than the code needs or lacks Click, msgspec, PyYAML or
rich, the file starts itself again under uv, which brings them; without uv, pip installs that into .cache/uv.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / ".cache" / "uv"
RESTARTED = "SPOTRL_RESTARTED"
SYSTEM_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
"""Debian and Ubuntu; Red Hat; Alpine and macOS."""


def main(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    trust_this_machine()
    if not ready():
        return restart(arguments)
    if os.environ.pop(RESTARTED, None):
        end_with_uv()
    from recipes.commands import cli  # ty: ignore[import-not-found]

    return cli.main(arguments)


def trust_this_machine() -> None:
    """Has uv trust the certificates of this machine where it has a list of them: a company's own are in no
    other."""
    if any(os.path.exists(path) for path in SYSTEM_CERTIFICATES):
        os.environ.setdefault("UV_SYSTEM_CERTS", "1")


def ready() -> bool:
    """Whether this interpreter can run the command line."""
    return sys.version_info >= (3, 11) and all(
        importlib.util.find_spec(name) for name in ("click", "msgspec", "yaml", "rich")
    )


def restart(arguments: list[str]) -> int:
    """Replaces this process by the same command under uv. Returns only where that cannot be: 2."""
    if os.environ.get(RESTARTED):
        return fail(
            "uv started this file without Click, msgspec, PyYAML or rich: remove .cache/uv and call it again"
        )
    uv = find_uv() or install_uv()
    if not uv:
        return 2
    os.environ[RESTARTED] = "1"
    os.environ["PATH"] = os.pathsep.join([str(Path(uv).parent), os.environ.get("PATH", os.defpath)])
    os.execv(uv, [uv, "run", "--quiet", "--script", str(ROOT / "launch.py"), *arguments])


def end_with_uv() -> None:
    """Has the kernel end this process when uv, which stays its parent and is what a person's shell knows, is
    killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def find_uv() -> str:
    """A uv that answers (a shim of pyenv may not); empty if there is none."""
    for uv in (shutil.which("uv"), str(Path.home() / ".local/bin/uv"), str(CACHE / "bin/uv")):
        if uv and os.access(uv, os.X_OK):
            probe = subprocess.run([uv, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if probe.returncode == 0:
                return uv
    return ""


def install_uv() -> str:
    """Installs uv into the repository's cache with pip. Empty, after one line that says what to do, if it
    cannot."""
    if importlib.util.find_spec("pip") is None:
        fail(
            "uv and pip are missing: install pip (Debian, Ubuntu: apt install python3-pip) or uv, and call"
            " this again"
        )
        return ""
    print("launch.py: installing uv into .cache/uv (once)", file=sys.stderr, flush=True)
    options = ("--quiet", "--disable-pip-version-check", "--target", str(CACHE))
    pip = [sys.executable, "-m", "pip", "install", *options, "uv"]
    done = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    uv = CACHE / "bin" / "uv"
    if done.returncode or not uv.exists():
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        fail("pip could not install uv (" + reason + "): install uv yourself and call this again")
        return ""
    return str(uv)


def fail(message: str) -> int:
    """Prints one line and returns the exit code for what a person can change."""
    print("launch.py: " + message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
