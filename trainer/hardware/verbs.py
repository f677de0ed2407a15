"""The library that NCCL opens at run time to use InfiniBand or RoCE, and without which it trains over TCP and
says nothing. `python3 trainer/hardware/verbs.py [FOLDER]` prints what is missing.

Common images (pytorch/pytorch, nvidia/cuda) have none. Standard library only.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
PACKAGES = "libibverbs1 ibverbs-providers librdmacm1"


def missing_libraries(devices: Path = DEVICES) -> list[str]:
    """The libraries that the devices of this machine need and that cannot be opened; [] without devices."""
    names = [path.name for path in devices.glob("*")]
    wanted = ["libibverbs.so.1"] if names else []
    if any(name.startswith("mlx5") for name in names):
        wanted.append("libmlx5.so.1")
    return [library for library in wanted if not _opens(library)]


def _opens(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(" ".join(missing_libraries(*map(Path, sys.argv[1:2]))))
