"""C of every function that the CUDA libraries of an environment export and the device does not answer itself:
it counts its call and returns success."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

REPLACED = {
    "libcudart.so.13": "nvidia/cu13/lib/libcudart.so.13",
    "libcublas.so.13": "nvidia/cu13/lib/libcublas.so.13",
    "libcublasLt.so.13": "nvidia/cu13/lib/libcublasLt.so.13",
    "libcusparse.so.12": "nvidia/cu13/lib/libcusparse.so.12",
    "libcufft.so.12": "nvidia/cu13/lib/libcufft.so.12",
    "libcurand.so.10": "nvidia/cu13/lib/libcurand.so.10",
    "libcudnn.so.9": "nvidia/cudnn/lib/libcudnn.so.9",
    "libnccl.so.2": "nvidia/nccl/lib/libnccl.so.2",
}
"""Libraries of wheels whose place the device takes: shared name -> file under site-packages."""
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the driver, which no wheel has."""

TEXTS = re.compile(r"(GetErrorString|GetErrorName|GetStatusString|GetStatusName|GetLastError)$")
MADE = re.compile(r"Create(_v\d)?$|DescriptorCreate$|^cublasCreate")
COMPUTES = re.compile(
    r"[Gg]emm|[Mm]atmul|[Gg]emv|[Tt]rsm|[sdczSDCZ]dot|[Dd]otEx|[Aa]xpy|[Ss]cal|[Nn]rm2|BackendExecute|SpMM|Exec"
)
"""Names of functions that would launch kernels."""


def exported(library: Path) -> set[str]:
    """Names of the functions that a library or an object file defines."""
    listed = subprocess.run(
        ["nm", "--defined-only", *(["-D"] if ".so" in library.name else []), str(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = set()
    for line in listed.stdout.splitlines():
        _, kind, name = line.split()
        if kind in "TW":
            names.add(name.partition("@")[0])
    return names


def of_driver(header: str) -> set[str]:
    """Names of the driver's functions in cuda.h, as its library exports them."""
    names = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    names |= set(re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)\b", header))
    for name, version in re.findall(
        r"#define\s+(cu[A-Z]\w+)\s+__CUDA_API_PT(?:DS|SZ)\(\w+?(_v\d)?\)", header
    ):
        names.add(name + version)
    return names


def needed(site: Path) -> set[str]:
    """Every function that something in this environment may call."""
    names = of_driver((site / "nvidia/cu13/include/cuda.h").read_text())
    for path in REPLACED.values():
        names |= exported(site / path)
    return {name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name) and not name.startswith("_Z")}


def source(names: Iterable[str]) -> str:
    """The C file."""
    lines = ["#include <stddef.h>", "void count(const char *kind, const char *what, size_t bytes);"]
    for name in sorted(names):
        kind = "launch" if COMPUTES.search(name) and not re.search(r"[GS]et|Create|Destroy", name) else "call"
        counted = f'count("{kind}", "{name}", 0);'
        if TEXTS.search(name):
            lines.append(f'const char *{name}(void) {{ return "an error of the null device"; }}')
        elif MADE.search(name) and name.startswith("cufft"):
            lines.append(f"int {name}(int *out) {{ {counted} if (out) *out = 1; return 0; }}")
        elif MADE.search(name) and name.startswith(("cublas", "cudnn", "cusparse", "curand")):
            lines.append(f"int {name}(void **out) {{ {counted} if (out) *out = (void *)4096; return 0; }}")
        else:
            lines.append(f"long {name}(void) {{ {counted} return 0; }}")
    return "\n".join(lines) + "\n"
