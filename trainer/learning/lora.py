"""LoRA in the policy: peft's layers stand where the model's own stood, the base model is the reference, and
what the engine gets are merged weights."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, LoRA
from trainer.config.lora import ADAPTER

WITHOUT_ADAPTER = re.compile(r"(?:.*\.)?layers\.\d+\.(?!.*(?:lora_|base_layer)|mlp\.shared_expert).*")
"""Paths of modules in decoder layers, but for those that peft makes of an adapted layer, and for a shared
expert and its gate."""


def inject_adapters(model: Any, lora: LoRA, seed: int) -> None:
    """Puts adapters around the target layers and freezes all other parameters.

    inject_adapter_in_model, not PeftModel: the modules keep their paths, which the policy goes by. Raises
    ConfigError where a decoder layer has linear layers that `LoRA` does not know. Experts and their routers
    get none, nor does a shared expert.
    """
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(seed)  # the factors A are drawn here, whatever was drawn while the model was loaded
    try:
        inject_adapter_in_model(LoraConfig(**lora.peft()), model)
    except ValueError as error:  # no layer of that name
        raise ConfigError(f"lora.rank {lora.rank}: {error}; set lora.rank to 0") from None
    without_adapter = _linear_without_adapter(model)
    if without_adapter is not None:
        raise ConfigError(
            f"lora.rank {lora.rank}: no adapter for {without_adapter} of {type(model).__name__}; set it to 0"
        )
    if lora.qlora:
        keep_backward(model)
        # On a 4-bit base model peft makes adapters in fp32; ZeRO needs one dtype.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(model.dtype)


def _linear_without_adapter(model: nn.Module) -> str | None:
    """Name of the first linear layer of a decoder layer that has no adapter, or None."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return next(filter(WITHOUT_ADAPTER.match, linear), None)


def silence_bitsandbytes() -> None:
    """Keeps bitsandbytes' notice of kernels for inference out of every start's log. Call it before
    bitsandbytes is imported."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_backward(model: nn.Module) -> None:
    """Forbids bitsandbytes to pack 4-bit weights for inference, which it does in evaluation mode on CPUs with
    AVX512-BF16: packed weights stay packed, and have no backward pass."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def adapters(names: dict[str, Any], model: nn.Module) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """(parameters of the base model by its own names, adapted layers by the name of their weight). names:
    every parameter of `model`, by name."""
    own = [(name.replace(".base_layer.", "."), p) for name, p in names.items() if ".lora_" not in name]
    modules = model.named_modules()
    return own, {f"{path}.weight": module for path, module in modules if hasattr(module, "lora_A")}


def adapter_factors(layer: Any) -> list[Any]:
    """The factors A [r, inputs] and B [outputs, r] of an adapted layer; empty if `layer` is None."""
    if layer is None:
        return []
    return [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]


def merged_weight(weight: Tensor, layer: Any) -> Tensor:
    """W + scale B A [outputs, inputs], computed in fp32 and rounded once; W itself where there is no
    adapter."""
    if layer is None:
        return weight
    a, b = adapter_factors(layer)
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[ADAPTER]).to(weight.dtype)


class BaseModel:
    """The base model inside the policy: its forward pass with the adapters' scale at 0, which adds exact
    zeros. Switching them off would change the order of modules that ZeRO-3 gathers ahead by."""

    def __init__(self, trained: Any, layers: list[Any]) -> None:
        self.trained = trained
        self.layers = layers

    def __call__(self, batch: Any) -> Any:
        """What the model without adapters returns for a micro-batch. Collective, without gradients."""
        scales = [layer.scaling[ADAPTER] for layer in self.layers]
        try:
            self._scale([0.0] * len(scales))
            return self.trained(batch)
        finally:
            self._scale(scales)

    def _scale(self, scales: list[float]) -> None:
        for layer, scale in zip(self.layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale
