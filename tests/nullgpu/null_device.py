"""Starts a command on a CUDA device that is not there:

python -m tests.nullgpu [--devices 8] [--card H100] COMMAND...
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.nullgpu import build

HOOKS = Path(__file__).with_name("hooks")
PYTHON = build.ROOT / ".venvs/gpu/bin/python"


def environment(
    *,
    devices: int = 1,
    card: str = "H100",
    record: Path | None = None,
    settings: Mapping[str, object] | None = None,
    hooks: bool = True,
    site: Path = build.SITE,
) -> dict[str, str]:
    """This process's variables, with the device.

    card: a key of `cards` in device/settings.c. record: folder for counts (counts.py). settings: more of the
    device's variables, without NULLGPU_. hooks: whether Python switches checks off that need values
    (hooks/sitecustomize.py).
    """
    folder = build.built(site)
    env = dict(os.environ)
    for name in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD"):
        env.pop(name, None)
    preloaded = [str(folder / "lib" / name) for name in build.names()]
    own = {
        "LD_PRELOAD": ":".join([str(folder / build.LIBRARY), *preloaded]),
        "LD_LIBRARY_PATH": joined(folder / "lib", env.get("LD_LIBRARY_PATH")),
        "PATH": joined(folder / "bin", env.get("PATH")),
        "NULLGPU": str(folder / build.LIBRARY),
        "NULLGPU_DEVICES": str(devices),
        "NULLGPU_CARD": card,
    }
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        own["NULLGPU_RECORD"] = str(record)
    if hooks:
        own["PYTHONPATH"] = joined(HOOKS, env.get("PYTHONPATH"))
    for name, value in (settings or {}).items():
        own[f"NULLGPU_{name}"] = str(value)
    return env | own


def joined(first: Path, rest: str | None) -> str:
    """A search path that begins with a folder."""
    return f"{first}:{rest}" if rest else str(first)


def run(
    command: Sequence[str | Path], *, timeout_s: float = 600, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command on the device, from the repository's root. options: as for `environment`."""
    words = [str(word) for word in command]
    env = environment(**options)
    done = subprocess.run(words, env=env, cwd=build.ROOT, capture_output=True, text=True, timeout=timeout_s)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words[:4])} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return done
