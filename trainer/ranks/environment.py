"""Environment variables that a rank's process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from trainer.config import RunConfig
from trainer.hardware.visible_gpus import VARIABLES, gpu_names
from trainer.ranks.heap import ARENAS

ALLOCATOR = "expandable_segments:True"
"""The setting of torch's GPU allocator that leaves no holes when the lengths of rows vary. vLLM switches
it off around the memory pool of its sleep mode (device_allocator/cumem.py)."""
PINNED = "pinned_max_cached_size_mb:64"
"""The setting that keeps torch from rounding large page-locked memory up to a power of two: what is larger is
neither rounded nor kept when it is freed. `pinned_max_round_threshold_mb` alone would leave it unrounded and
keep it, and torch 2.13 then gives a kept block to any tensor up to the next power of two: copies run over its
end (pytorch#192722). A torch that does not know an option ends the process."""
KNOWS_PINNED = (2, 13)
"""Oldest torch in which that option was seen."""


def allocator_setting() -> str:
    """The value of PYTORCH_ALLOC_CONF."""
    major, minor = version("torch").split(".")[:2]
    if (int(major), int(minor)) < KNOWS_PINNED:
        return ALLOCATOR
    return f"{ALLOCATOR},{PINNED}"


def rank_environment(config: RunConfig) -> dict[str, str]:
    """Variables that vLLM, DeepSpeed and torch must find before they are imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "MALLOC_ARENA_MAX": str(ARENAS),
        # Ray rotates a process's log by a pipe and a thread of that process: its last words would be lost.
        "RAY_ROTATION_MAX_BYTES": "0",
    }
    if config.placement.device == "cpu":
        threads = str(config.placement.threads_per_worker)
        env |= {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Every packed pass has new shapes, and oneDNN and torch's bridge to it each keep what they
            # compiled for the last 1,024, 0.6 MB each. This many hold the products of one pass.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
            "LRU_CACHE_CAPACITY": "128",
            # Else the first log-prob call compiles for 14 s.
            "TORCHDYNAMO_DISABLE": str(int(config.model.kernels == "plain")),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks of one machine would all bind to its first core
        }
    else:
        env |= SHOW_ALL | {"PYTORCH_ALLOC_CONF": allocator_setting()}
        if config.run.deterministic == "cuda":
            env |= {"VLLM_BATCH_INVARIANT": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return env


SHOW_ALL = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in VARIABLES}
"""With these set, Ray does not change the GPU variables of its actors."""


def device_position(gpu: str, env: Mapping[str, str]) -> int:
    """torch's index of a GPU that Ray named by index or UUID. torch counts within the node's own list."""
    names = gpu_names(env)
    return int(gpu) if names is None else names.index(gpu.strip())
