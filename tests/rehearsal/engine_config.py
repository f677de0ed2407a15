"""What vLLM makes of recipes' engines on a card, without one: `.venvs/gpu/bin/python -m
tests.rehearsal.engine_config CARD FOLDER RECIPE...`.

vLLM's CUDA platform is given a card's answers: capability, memory, processors. Its configuration then
resolves as it would there. Prints what decides the GPU path as one object of JSON by recipe. FOLDER/RECIPE
holds the model's configuration and a tokenizer; no weights are read.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LOCAL_RANK": "0",
    "RANK": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
}
"""This process's, before vLLM is imported. A test that imports this module keeps its own."""


@dataclass(frozen=True)
class Card:
    """What a driver says of a GPU."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    processors: int


CARDS = {
    "A100-80GB": Card("NVIDIA A100-SXM4-80GB", (8, 0), 79.2, 108),
    "L40S": Card("NVIDIA L40S", (8, 9), 44.4, 142),
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 79.2, 132),
    "B200": Card("NVIDIA B200", (10, 0), 178.4, 148),
}


def answer_as(card: Card) -> None:
    """Puts a card's answers into torch and vLLM's platform."""
    import torch
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    platform: Any = cuda.NonNvmlCudaPlatform
    memory = int(card.memory_gib * 2**30)
    platform.get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(*card.capability))
    platform.get_device_name = classmethod(lambda _, device_id=0: card.name)
    platform.get_device_total_memory = classmethod(lambda _, device_id=0: memory)
    platform.num_compute_units = classmethod(lambda _, device_id=0: card.processors)
    platform.device_count = classmethod(lambda _: 8)
    platform.is_fully_connected = classmethod(lambda _, ids: True)
    vllm.platforms._current_platform = platform()
    properties = SimpleNamespace(
        multi_processor_count=card.processors,
        total_memory=memory,
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
    )
    fake: Any = torch.cuda
    fake.get_device_capability = lambda *_: card.capability
    fake.device_count = lambda: 8
    fake.is_available = lambda: True
    fake.get_device_properties = lambda *_: properties


def resolved(recipe: str, folder: str) -> dict[str, Any]:
    """The resolved configuration of a recipe's engine."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from recipes.presets import get
    from trainer.hardware.architectures import FAMILIES
    from trainer.sampling.vllm_engine import engine_arguments
    from trainer.weights import in_process

    in_process.register_transfer()
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    config = get(recipe).config
    config = replace(config, model=replace(config.model, path=folder, revision=""))
    os.environ["WORLD_SIZE"] = str(config.placement.world_size)
    size = {"shortest_edge": config.model.min_pixels, "longest_edge": config.model.max_pixels}
    prompter: Any = SimpleNamespace(
        has_vision=True, size=size, banned_token_ids=lambda: [7], architecture=FAMILIES[kind]
    )
    parameters = engine_arguments(config, prompter, 1)
    made = EngineArgs(**parameters).create_engine_config(UsageContext.LLM_CLASS)
    scheduler, compilation = made.scheduler_config, made.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    return {
        "model runner V2": made.use_v2_model_runner,
        "asynchronous scheduling": scheduler.async_scheduling,
        "sequences": scheduler.max_num_seqs,
        "tokens of a batch": scheduler.max_num_batched_tokens,
        "chunked prefill": scheduler.enable_chunked_prefill,
        "tokens of images in a batch": scheduler.max_num_encoder_input_tokens,
        "compilation": str(compilation.mode),
        "CUDA graphs": str(compilation.cudagraph_mode),
        "graph sizes": len(sizes),
        "largest graph": max(sizes, default=0),
        "FlashInfer is tuned at the start": made.kernel_config.enable_flashinfer_autotune,
        "custom all-reduce": not made.parallel_config.disable_custom_all_reduce,
        "sleep mode": made.model_config.enable_sleep_mode,
        "prefix caching": made.cache_config.enable_prefix_caching,
        "block size": made.cache_config.block_size,
        "prompts' recurrence": made.additional_config.get("gdn_prefill_backend", ""),
        "recurrent state": str(made.cache_config.mamba_ssm_cache_dtype),
        "expert parallel": made.parallel_config.enable_expert_parallel,
        "tower's attention": str(current_platform.get_vit_attn_backend(80, torch.bfloat16)),
    }


def main(card: str, folder: str, *recipes: str) -> None:
    os.environ |= ENVIRONMENT
    answer_as(CARDS[card])
    print(json.dumps({recipe: resolved(recipe, f"{folder}/{recipe}") for recipe in recipes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
