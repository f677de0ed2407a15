"""Whether this machine's NVIDIA driver can run the CUDA that is to be installed: `python3
trainer/hardware/driver.py`.

One rule for the set-up, for this command and for the preflight: what the libcuda that a program loads here
answers. A kernel module of an older release may run it through NVIDIA's forward-compatibility libraries.
Answers in a second, before 20 GB are downloaded. Standard library only, run as a file, Python 3.8 or newer.
Exit code 36 (another machine may do) with one line, else 0. `--version` prints the answer alone.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

NEEDED = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Oldest driver that brings a major version of CUDA: NVIDIA, CUDA Toolkit release notes, minor-version
compatibility."""
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "gpu.txt"
EXIT_MACHINE = 36


def loaded_cuda() -> int | str:
    """CUDA version of the libcuda that is loaded here, 1000 * major + 10 * minor; what is wrong, if
    anything."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no GPU driver ({error})"
    code = cuda.cuInit(0)
    version = ctypes.c_int()
    code = code or cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"cuInit says error {code}" if code else version.value


def required_cuda(requirements: Path = REQUIREMENTS) -> int:
    """Major version of CUDA that a requirements file installs; 0 where it names none."""
    text = requirements.read_text() if requirements.exists() else ""
    match = re.search(r"^nvidia-cuda-runtime(?:-cu\d+)?==(\d+)\.", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def driver_problem(answer: int | str, cuda: int) -> str:
    """What is wrong in one line, or "". answer: as `loaded_cuda` gives it. cuda: the major version that is
    wanted."""
    if isinstance(answer, str):
        return f"{answer}: take a GPU machine, or start the container with its GPUs"
    if answer // 1000 < cuda:
        loaded = f"{answer // 1000}.{answer % 1000 // 10}"
        return (
            f"the loaded driver library runs CUDA {loaded}, and CUDA {cuda} needs driver"
            f" {NEEDED.get(cuda, '')}"
            " or newer, or NVIDIA's forward-compatibility libraries: take another machine"
        )
    return ""


def main() -> int:
    """Prints what the driver answers, or what is wrong."""
    answer = loaded_cuda()
    if sys.argv[1:] == ["--version"]:
        print(answer)
        return 0
    wrong = driver_problem(answer, required_cuda())
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return EXIT_MACHINE
    print(f"the loaded driver library runs CUDA {int(answer) // 1000}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
