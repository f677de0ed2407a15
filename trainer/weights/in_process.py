"""Weights from the policy's shards into the engine that lives in the same process, through vLLM's
weight-transfer API.

`push_weights` streams one group of layers at a time: all ranks gather it, each loads its own tensor-parallel
part of it, and it is freed. vLLM's layerwise reloading re-packs what its kernels had packed; `load_weights`
alone would not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from trainer.weights.source import WeightSource

BACKEND = "in_process"
"""Name of the weight transfer, and of the model loader that loads no weights itself."""
CHATTY = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.v1.worker.cpu_worker")
"""Loggers of vLLM that say at every new version that layers without weights of their own, such as a tied
head, failed to load some. A layer that lacks its weights is found by the check of the first sync."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty: sender and receiver share a process."""


@dataclass
class WeightGroup(WeightTransferUpdateInfo):
    """One group of full tensors in Hugging Face names."""

    weights: list[tuple[str, Tensor]]


class InProcessEngine(WeightTransferEngine[NoInit, WeightGroup]):
    """vLLM's side of the transfer. It gets tensors of the same process by reference."""

    init_info_cls = NoInit
    update_info_cls = WeightGroup

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Makes the model's layers ready to take checkpoint-format weights again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._head_received = False
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightGroup) -> None:
        """Loads one group; each layer is re-packed as soon as it is whole."""
        weights = []
        for name, tensor in update_info.weights:
            if name.endswith("lm_head.weight"):
                self._head_received = True
            if ".mlp.experts." in name and self._expects_transposed_experts():
                weights.append((name, tensor.transpose(1, 2)))
            else:
                weights.append((name, tensor))
        model: Any = self.model
        model.load_weights(weights)

    def _expects_transposed_experts(self) -> bool:
        """Whether vLLM expects experts' weights as [experts, inputs, outputs], as the files of some models
        have them. They arrive as [experts, outputs, inputs]."""
        return any(getattr(layer, "is_fused_checkpoint_transposed", False) for layer in self.model.modules())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one group. On a GPU it waits until the copy is done, because the caller frees the tensors
        afterwards."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Re-packs the layers that are not re-packed yet."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_experts()
        # Qwen3-VL adds these inputs to tokens without an image too, so they must be zero. They are not
        # registered as buffers, and sleep level 2 does not keep their content.
        for scratch in getattr(self.model, "deepstack_input_embeds", None) or ():
            scratch.zero_()
        if not self._head_received:
            self._retie()

    def _pack_experts(self) -> None:
        """Packs experts for vLLM's CPU kernels again. A reload packs every other kind of layer, but vLLM
        packs experts only when it makes their kernel."""
        if self.device.type != "cpu":
            return
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def _retie(self) -> None:
        """Ties the head to the embedding again. A tied head gets no weights of its own, so that after a
        reload it would keep the old ones (on CPU it is a packed copy)."""
        head = self._module("lm_head")
        if head is None:  # the head is the embedding itself
            return
        head.tie_weights(self._module("embed_tokens"))
        head.quant_method.process_weights_after_loading(head)

    def _module(self, ending: str) -> Any:
        """The model's first module whose name ends with `ending`, or None."""
        for name, module in self.model.named_modules():
            if name.endswith(ending):
                return module
        return None

    def shutdown(self) -> None:
        """Nothing is held."""


class NoWeights(BaseModelLoader):
    """A model loader that reads no file, since the first sync brings every weight. vLLM's "dummy" loader
    would also randomize buffers, and no sync brings those."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to do."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Sets all weights to zero: fresh memory may hold NaN."""
        for parameter in model.parameters():
            parameter.data.zero_()


def register_transfer() -> None:
    """Registers the transfer and the loader with vLLM, once per process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessEngine)
        register_model_loader(BACKEND)(NoWeights)


def push_weights(weights: WeightSource, engine: Any) -> None:
    """Replaces all of the engine's weights, then empties every cache that rests on the old ones. The source
    brings every parameter of the model, a frozen tower too: sleep level 2 discarded it. engine:
    trainer/sampling's `Engine`."""
    engine.call("start_weight_update")
    for group in weights.groups():
        # The copies are not named here: a name would keep them alive while the next group is gathered.
        engine.call("update_weights", {"weights": _copied(group)})
        del group  # nor is the group itself
    engine.call("finish_weight_update")
    engine.reset_caches()
    engine.version = weights.version


def _copied(group: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies of a group's tensors. vLLM's loaders may keep references until a layer is complete, but the
    gathered tensors are freed after each group."""
    return [(name, tensor.detach().clone()) for name, tensor in group]
