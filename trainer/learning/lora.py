"""LoRA in the policy: peft's layers in the model's own places, the base model as the reference, merged
weights out."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, LoRA
from trainer.config.lora import ADAPTER


def inject(model: Any, lora: LoRA, seed: int) -> None:
    """Puts adapters around the target layers and freezes all other parameters.

    inject_adapter_in_model, not PeftModel: the modules keep their paths, which the policy goes by. Raises
    ConfigError where a decoder layer has linear layers that `LoRA` does not know.
    """
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(seed)  # A is drawn here, whatever loading the model has drawn before
    try:
        inject_adapter_in_model(LoraConfig(**lora.peft()), model)
    except ValueError as error:  # no layer of that name
        raise ConfigError(f"lora.rank {lora.rank}: {error}; set lora.rank to 0") from None
    decoder = re.compile(r"(?:.*\.)?layers\.\d+\.(?!.*(?:lora_|base_layer)).*")
    left = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and decoder.match(name)
    ]
    if left:
        raise ConfigError(
            f"lora.rank {lora.rank}: no adapter for {left[0]} of {type(model).__name__}; set it to 0"
        )
    if lora.qlora:
        keep_backward(model)
        # on a 4-bit base peft makes adapters fp32; ZeRO needs one dtype
        for p in (p for p in model.parameters() if p.requires_grad):
            p.data = p.data.to(model.dtype)


def quiet() -> None:
    """Before bitsandbytes is imported: keeps its notice of kernels for inference out of every start's log."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_backward(model: nn.Module) -> None:
    """Forbids bitsandbytes to pack 4-bit weights for inference, which it does in evaluation mode on CPUs with
    AVX512-BF16: packed weights stay packed, and have no backward pass."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def adapters(names: dict[str, Any], model: nn.Module) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """(parameters of the base model by its own names, adapted layers by the name of their weight).

    names: every parameter of `model`, by name.
    """
    layers = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    base = [(name.replace(".base_layer.", "."), p) for name, p in names.items() if ".lora_" not in name]
    return base, layers


def factors(layer: Any) -> list[Any]:
    """[A [r, inputs], B [outputs, r]] of an adapted layer; none of another (None)."""
    return [] if layer is None else [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]


def merged(weight: Tensor, layer: Any) -> Tensor:
    """W + scale B A [outputs, inputs], computed in fp32 and rounded once; W itself where there is no
    adapter."""
    if layer is None:
        return weight
    a, b = factors(layer)
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[ADAPTER]).to(weight.dtype)


class Base:
    """The base model inside the policy: its forward pass with the adapters' scale at 0, which adds exact
    zeros.

    Switching them off would change the order of modules that ZeRO-3 gathers ahead by.
    """

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
