"""Whether Triton can build its launchers here: they are C, compiled against this Python when a kernel first
runs.

Clouds' images have what it takes; login and compute nodes of a cluster often do not.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

COMPILERS = ("gcc", "clang", "cc")
"""What Triton looks for, where CC names none."""


def missing_compiler_parts(env: Mapping[str, str] = os.environ, include: str = "") -> list[str]:
    """What is not there, in words; [] where nothing is missing. include: Python's headers, if not this
    one's."""
    found = []
    names = [env["CC"]] if env.get("CC") else COMPILERS
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        found.append(f"no C compiler ({' or '.join(names)})")
    headers = Path(include or sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        found.append(f"no Python.h in {headers}")
    return found


def compiler_row(lacks: Sequence[str]) -> tuple[str, str, str, str]:
    """(what is wrong or "", figure, target, remedy). lacks: as `missing_compiler_parts` gave it."""
    wrong = f"Triton builds its launchers when a kernel first runs: {', '.join(lacks)}" if lacks else ""
    remedy = "install gcc and python3-dev (dnf: gcc python3-devel), load the site's compiler module in "
    return wrong, "there", "a C compiler and Python.h", remedy + "site.prelude, or set CC"
