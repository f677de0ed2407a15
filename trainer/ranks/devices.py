"""Which GPU of its machine belongs to a rank, where every rank sees all of them.

Ray would show each actor its own GPU only. Then vLLM's all-reduce, which reaches the peers' memory by their
index, is off, and NCCL takes two to three times as long for the small ones of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping

SEEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list a node's GPUs by index or UUID, where a site or a person has chosen some of them."""
SHOW_ALL = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in SEEN}
"""With these set, Ray does not change the GPU variables of its actors."""


def device_position(gpu: str, env: Mapping[str, str]) -> int:
    """torch's index of a GPU that Ray named by index or UUID. torch counts within the node's own list."""
    for name in SEEN:
        if listed := env.get(name, ""):
            return [one.strip() for one in listed.split(",")].index(gpu)
    return int(gpu)
