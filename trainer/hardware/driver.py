"""Whether this machine's NVIDIA driver can run the CUDA that is to be installed: `python3
trainer/hardware/driver.py`.

Answers in milliseconds, before 20 GB are downloaded. Standard library only, run as a file, Python 3.8 or
newer. Exit code 36 (another machine may do) with one line, else 0. Read from the kernel module, then from
nvidia-smi.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NEEDED = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest driver per major version of CUDA: NVIDIA, CUDA Toolkit release notes, minor-version
compatibility."""
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "gpu.txt"
MODULE = Path("/proc/driver/nvidia/version")
EXIT_MACHINE = 36


def installed(module: Path = MODULE) -> str:
    """Version of the driver, such as "570.124.06"; "" where there is none."""
    try:
        found = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", module.read_text())
    except OSError:
        found = None
    if found:
        return found.group(1)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines and re.match(r"\d+\.\d+", lines[0]) else ""


def cuda_of(requirements: Path = REQUIREMENTS) -> int:
    """Major version of CUDA that a requirements file installs; 0 where it names none."""
    text = requirements.read_text() if requirements.exists() else ""
    found = re.search(r"^nvidia-cuda-runtime(?:-cu\d+)?==(\d+)\.", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def problem(driver: str, cuda: int) -> str:
    """What is wrong in one line, or ""."""
    oldest = NEEDED.get(cuda)
    if not driver:
        return "no NVIDIA driver answers here: take a GPU machine, or start the container with its GPUs"
    if oldest and tuple(map(int, driver.split(".")[:2])) < oldest:
        needs = ".".join(map(str, oldest))
        return (
            f"driver {driver} is too old for CUDA {cuda}, which needs {needs} or newer: take another machine"
        )
    return ""


def main() -> int:
    """Prints the driver, or what is wrong."""
    driver, cuda = installed(), cuda_of()
    wrong = problem(driver, cuda)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return EXIT_MACHINE
    print(f"driver {driver} runs CUDA {cuda}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
