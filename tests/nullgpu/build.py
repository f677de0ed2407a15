"""Compiles the device for an environment, once: the folder is named by everything that it is made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.nullgpu import stubs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SITE = ROOT / ".venvs/gpu/lib/python3.11/site-packages"
LIBRARY = "libnullgpu.so"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spotrl/nullgpu"


def key(site: Path) -> str:
    """A hash of the device's source and of the versions that are installed."""
    digest = hashlib.sha256()
    for path in sorted([*(HERE / "device").iterdir(), HERE / "stubs.py", HERE / "build.py"]):
        digest.update(path.read_bytes())
    for folder in sorted(site.glob("*.dist-info")):
        digest.update(folder.name.encode())
    return digest.hexdigest()[:16]


def built(site: Path = SITE) -> Path:
    """The folder with the device. Raises FileNotFoundError without the environment, CalledProcessError where
    gcc refuses."""
    if not (site / "nvidia/cu13/include/cuda.h").exists():
        raise FileNotFoundError(f"{site} has no CUDA wheels: bash trainer/shell/setup.sh gpu")
    out = cache() / key(site)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, ignore_cleanup_errors=True) as folder:
            making = Path(folder) / "device"
            making.mkdir()
            make(site, making)
            with contextlib.suppress(OSError):  # somebody else was faster
                making.rename(out)
    return out


def make(site: Path, out: Path) -> None:
    """Compiles library, links of its names, and nvidia-smi."""
    includes = [f"-I{site}/nvidia/cu13/include", f"-I{site}/nvidia/nccl/include"]
    objects = []
    for path in sorted((HERE / "device").glob("*.c")):
        if path.stem != "nvidia_smi":
            objects.append(out / f"{path.stem}.o")
            gcc("-O2", "-Wall", "-Werror", "-fPIC", *includes, "-c", path, "-o", objects[-1])
    own = set()
    for path in objects:
        own |= stubs.exported(path)
    (out / "stubs.c").write_text(stubs.source(stubs.needed(site) - own))
    gcc("-O1", "-w", "-fPIC", "-c", out / "stubs.c", "-o", out / "stubs.o")
    gcc(
        "-shared",
        "-o",
        out / LIBRARY,
        *objects,
        out / "stubs.o",
        "-ldl",
        "-lpthread",
        f"-Wl,-soname,{LIBRARY}",
    )

    # Each library that programs ask for by name is an empty one that needs the device.
    (out / "lib").mkdir()
    for name in names():
        link = [f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN/.."]
        if name in stubs.REPLACED:  # torch asks for a version by the library's name
            version = out / f"{name}.map"
            version.write_text(f"{name} {{ }};\n")
            link.append(f"-Wl,--version-script={version}")
        gcc("-shared", "-nostdlib", "-o", out / "lib" / name, *link, f"-L{out}", "-lnullgpu")
    (out / "bin").mkdir()
    smi = out / "bin/nvidia-smi"
    gcc("-O1", "-o", smi, HERE / "device/nvidia_smi.c", f"-L{out}", "-lnullgpu", "-Wl,-rpath,$ORIGIN/..")


def names() -> list[str]:
    """Shared names of the libraries whose place the device takes."""
    return [*stubs.DRIVER, *stubs.REPLACED]


def gcc(*arguments: str | Path) -> None:
    subprocess.run(["gcc", *map(str, arguments)], check=True)
