"""Weights from the policy's shards into the engine that lives in the same process, through vLLM's
weight-transfer API.

`push` streams one group of layers at a time: all ranks gather it, each loads its own tensor-parallel part of
it, and it is freed. vLLM's layerwise reloading re-packs what its kernels had packed; `load_weights` alone
would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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


class Receiver(Protocol):
    """What `push` needs of an engine."""

    version: int
    """Version of the weights that the engine holds."""

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of vLLM's worker."""

    def reset_caches(self) -> None:
        """Empties every cache that rests on the old weights."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty: sender and receiver share a process."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    """One group of full tensors in Hugging Face names."""

    weights: list[tuple[str, Tensor]]


class InProcessEngine(WeightTransferEngine[NoInit, Weights]):
    """vLLM's side of the transfer. It gets tensors of the same process by reference."""

    init_info_cls = NoInit
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Makes the model's layers ready to take checkpoint-format weights again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._head_came = False
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Weights) -> None:
        """Loads one group; each layer is re-packed as soon as it is whole."""
        model: Any = self.model
        self._head_came |= any(name.endswith("lm_head.weight") for name, _ in update_info.weights)
        model.load_weights(update_info.weights)

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
        # Qwen3-VL adds these to tokens without an image too. They are no buffers: sleep level 2 loses their
        # zeros.
        for scratch in getattr(self.model, "deepstack_input_embeds", None) or ():
            scratch.zero_()
        if not self._head_came:
            self._retie()

    def _retie(self) -> None:
        """Ties the head to the embedding again. A tied head gets no weights of its own, so that after a
        reload it would keep the old ones (on CPU it is a packed copy)."""
        modules: dict[str, Any] = dict(self.model.named_modules())
        head = next((m for name, m in modules.items() if name.endswith("lm_head")), None)
        if head is None:  # vLLM 0.26: the head is the embedding itself
            return
        embedding = next(m for name, m in modules.items() if name.endswith("embed_tokens"))
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.26; not used here."""
        raise NotImplementedError


class NoWeights(BaseModelLoader):
    """A model loader that reads no file, since the first sync brings every weight. vLLM's "dummy" loader
    would also randomize buffers, and no sync brings those."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to do."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Sets all weights to zero: fresh memory may hold NaN."""
        for parameter in model.parameters():
            parameter.data.zero_()


def register() -> None:
    """Registers the transfer and the loader with vLLM, once per process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessEngine)
        register_model_loader(BACKEND)(NoWeights)


def push(weights: WeightSource, engine: Receiver) -> None:
    """Replaces all of the engine's weights, then empties every cache that rests on the old ones.

    The source brings every parameter of the model, a frozen tower too: sleep level 2 discarded it.
    """
    engine.call("start_weight_update")
    for group in weights.groups():
        # Loaders may keep references until a layer is whole, and the gathered buffers are freed after each
        # group.
        engine.call(
            "update_weights", {"weights": [(name, tensor.detach().clone()) for name, tensor in group]}
        )
    engine.call("finish_weight_update")
    engine.reset_caches()
    engine.version = weights.version
