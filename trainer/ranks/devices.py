"""Which GPU of its machine belongs to a rank, where every rank sees all of them.

Ray would show each actor its own GPU only. Then vLLM's all-reduce, which reaches the peers' memory by their
index, is off, and NCCL takes two to three times as long for the small ones of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.hardware.visible_gpus import VARIABLES, gpu_names

SHOW_ALL = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in VARIABLES}
"""With these set, Ray does not change the GPU variables of its actors."""


def device_position(gpu: str, env: Mapping[str, str]) -> int:
    """torch's index of a GPU that Ray named by index or UUID. torch counts within the node's own list."""
    names = gpu_names(env)
    return int(gpu) if names is None else names.index(gpu.strip())
