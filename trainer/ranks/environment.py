"""The variables that a worker's process is started with."""

from __future__ import annotations

from trainer.config import RunConfig
from trainer.ranks.heap import ARENAS


def environment(config: RunConfig) -> dict[str, str]:
    """Variables that vLLM, DeepSpeed and torch must find before they are imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "MALLOC_ARENA_MAX": str(ARENAS),
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
            "TORCHDYNAMO_DISABLE": "1",  # else the first log-prob call compiles for 14 s
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks of one machine would all bind to its first core
        }
    else:
        # These all-reduces look for the peers' GPUs by index, where a rank is shown one, and would fail on
        # some ranks.
        env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    return env
