"""Which GPUs of its machine a process may use: the one reading of CUDA_VISIBLE_DEVICES and its relatives, for
preflight, ranks, workers and the monitor.

As CUDA reads it: indices, UUIDs or MIG ids, an id by a prefix of its own; an empty list is no GPU, and what
stands behind the first name without a GPU is not seen.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list a node's GPUs, where a site or a person has chosen some of them."""


def gpu_variable(env: Mapping[str, str] = os.environ) -> str:
    """The variable that lists this node's GPUs, and the one to set where none does."""
    return next((name for name in VARIABLES if name in env), VARIABLES[0])


def gpu_names(env: Mapping[str, str] = os.environ) -> list[str] | None:
    """The GPUs as they are listed, without blanks; None where no variable chooses, so that all are ours."""
    listed = env.get(gpu_variable(env))
    if listed is None:
        return None
    names: list[str] = []
    for written in listed.split(","):
        name = written.strip()
        if not re.fullmatch(r"[0-9]+|[A-Za-z][\w./-]*", name, re.ASCII):
            break
        names.append(name)
    return names if len(set(names)) == len(names) else []


def visible_positions(ids: Sequence[Sequence[str]], env: Mapping[str, str] = os.environ) -> list[int]:
    """Positions of the machine's GPUs that are listed, one for each name: a card appears as often as parts of
    it are. ids: of each GPU of the machine its UUID, then those of its MIG instances."""
    names = gpu_names(env)
    if names is None:
        return list(range(len(ids)))
    positions: list[int] = []
    for name in names:
        position = _position(name, ids)
        if position is None:
            break
        positions.append(position)
    return positions


def _position(name: str, ids: Sequence[Sequence[str]]) -> int | None:
    if name.isdigit():
        return int(name) if int(name) < len(ids) else None
    # MIG-GPU-<uuid>/<instance>/<compute instance>, as drivers before 470 wrote
    if name.startswith("MIG-GPU-"):
        name = name.removeprefix("MIG-").partition("/")[0]
    holders = []
    for position, of_gpu in enumerate(ids):
        if any(known.lower().startswith(name.lower()) for known in of_gpu):
            holders.append(position)
    return holders[0] if len(holders) == 1 else None


def nvml_positions(nvml: Any, env: Mapping[str, str] = os.environ) -> list[int]:
    """NVML's indices of the GPUs that are ours, each once. nvml: the module pynvml, initialized."""
    if gpu_names(env) is None:
        return list(range(nvml.nvmlDeviceGetCount()))
    ids = []
    for index in range(nvml.nvmlDeviceGetCount()):
        ids.append(_nvml_ids(nvml, index))
    return list(dict.fromkeys(visible_positions(ids, env)))


def _nvml_ids(nvml: Any, index: int) -> list[str]:
    """A GPU's UUID and its MIG instances'; what a card that is gone does not tell is left out."""
    ids: list[str] = []
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        ids.append(nvml.nvmlDeviceGetUUID(handle))
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # fewer instances than there may be
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                ids.append(nvml.nvmlDeviceGetUUID(instance))
    return ids
