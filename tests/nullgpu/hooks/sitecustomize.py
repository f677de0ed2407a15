"""What Python does differently on the device, in every process that starts there: checks are off that need
computed values, who looks for libcudart gets the device, and ranks name their phases. All of it is below."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable


def without_cudnn(torch) -> None:
    """cuDNN's graphs are asked for sizes that no stub knows; torch has convolutions of its own."""
    torch.backends.cudnn.enabled = False


def without_token_check(module) -> None:
    """Image tokens are compared with features by numbers that were computed on the device."""
    module.torch_compilable_check = lambda *arguments, **keywords: None


def with_this_runtime(module) -> None:
    """torch opens the wheel's libcudart by its path, and vLLM's sleep mode would copy by that one."""
    module.find_loaded_library = lambda name: os.environ["NULLGPU"]


def with_phases(module) -> None:
    """What a rank is called for is the phase of what it does on the device."""
    device = ctypes.CDLL(os.environ["NULLGPU"])
    call = module.RankProcess.call

    def in_phase(self, method, *arguments):
        device.nullgpu_phase(method.__qualname__.encode())
        return call(self, method, *arguments)

    module.RankProcess.call = in_phase


AFTER_IMPORT: dict[str, Callable] = {
    "torch": without_cudnn,
    "trainer.ranks.process": with_phases,
    "vllm.distributed.device_communicators.cuda_wrapper": with_this_runtime,
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl": without_token_check,
    "transformers.models.qwen3_vl.modeling_qwen3_vl": without_token_check,
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe": without_token_check,
    "transformers.models.qwen3_5.modeling_qwen3_5": without_token_check,
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": without_token_check,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above as everybody does, and has their loader call the function."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in AFTER_IMPORT:
            return None
        change = AFTER_IMPORT.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loaded = spec.loader.exec_module

        def load(module):
            loaded(module)
            change(module)

        spec.loader.exec_module = load
        return spec


sys.meta_path.insert(0, Finder())
