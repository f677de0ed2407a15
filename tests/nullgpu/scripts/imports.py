"""Imports every module of the trainer, and what a run imports beside it. Prints what failed, as JSON."""

from __future__ import annotations

import importlib
import json
import pkgutil

import trainer

BESIDE = (
    "vllm",
    "vllm._C",
    "vllm.device_allocator.cumem",
    "vllm.distributed.weight_transfer",
    "vllm.v1.worker.gpu_worker",
    "vllm.vllm_flash_attn",
    "flashinfer",
    "cutlass",
    "cuda.bindings.driver",
    "triton",
    "deepspeed",
    "fla.ops.gated_delta_rule",
    "bitsandbytes",
    "peft",
)
"""What vLLM guards by `except ImportError` fails late, or silently: each is imported by itself."""


def main() -> None:
    names = [module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer.")]
    wrong = {}
    for name in [*BESIDE, *names]:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except BaseException as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"imported": len(names) + len(BESIDE) - len(wrong), "wrong": wrong}))


if __name__ == "__main__":
    main()
