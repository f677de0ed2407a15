"""Whole weights that a worker can begin with: the pretrained model, or a checkpoint of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.failures import CorruptCheckpoint
from trainer.checkpoint.layout import local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import unpack
from trainer.checkpoint.shard_reader import FoundCheckpoint, ShardReader
from trainer.config import RunConfig
from trainer.fleet.fleet_records import Anchor
from trainer.learning import lora
from trainer.storage import hub
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage


class HostModel:
    """Weights in host memory."""

    def __init__(self, model: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        self.tensors: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
        """Every parameter by the policy's names, adapters too."""
        self._base, self._adapted = lora.adapters(self.tensors, model)
        self._adapters = {name: tensor.clone() for name, tensor in self.tensors.items() if ".lora_" in name}
        """The adapters as they begin."""

    @property
    def whole(self) -> bool:
        """Whether it has weights; not after `begin_anew` has failed."""
        return all(tensor.numel() for tensor in self.tensors.values())

    def begin_anew(self, config: RunConfig) -> None:
        """Brings the values of `load_pretrained` back. With adapters only these have changed; else the model
        is read again, in the place of what is here: two copies of it may not fit the host."""
        if self._adapters:
            for name, tensor in self._adapters.items():
                self.tensors[name].copy_(tensor)
            return
        for tensor in self.tensors.values():
            tensor.data = tensor.new_empty(0)
        for name, tensor in load_pretrained(config).tensors.items():
            self.tensors[name].data = tensor

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own parameters by its own names, adapters merged in."""
        for name, tensor in self._base:
            yield name, lora.merged_weight(tensor, self._adapted.get(name))


@torch.no_grad()
def load_pretrained(config: RunConfig) -> HostModel:
    """The pretrained model in the run's type, with the run's adapters as they begin.

    The classes that load it are those that load the policy, so that names and values are the policy's own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = config.model
    if hub.from_hub(config):
        hub.fetch_files(config, hub.weight_files(config))
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    arguments: dict[str, Any] = {"dtype": dtype} | ({"revision": model.revision} if model.revision else {})
    try:
        loaded = AutoModelForImageTextToText.from_pretrained(model.path, **arguments)
    except ValueError:  # not a vision-language architecture
        loaded = AutoModelForCausalLM.from_pretrained(model.path, **arguments)
    if config.lora.rank:
        lora.inject_adapters(loaded, config.lora, config.run.seed)
    return HostModel(loaded)


@torch.no_grad()
def fill_from_anchor(model: HostModel, config: RunConfig, anchor: Anchor) -> None:
    """Brings an anchor's weights into `model`, which holds the pretrained model or a later version of it.

    A checkpoint holds the trained parameters in fp32: rounded they are the weights that were published. Its
    manifest is signed, and holds the sha256 of the files that hold the sums of every block that is read.
    Raises CorruptCheckpoint, StorageError; FileNotFoundError where the checkpoint is gone.
    """
    if anchor.kind == "model" or not model.whole:
        model.begin_anew(config)
    if anchor.kind == "model":
        return
    inside = remote_folder(anchor.version, anchor.attempt)
    folder = f"{remote_url(config)}/{inside}"
    manifest = unpack(Storage(folder).get_bytes("manifest.json"), Seal.of(config), inside)
    if manifest is None or manifest["step"] != anchor.version:
        raise CorruptCheckpoint(f"{folder}/manifest.json is damaged, or was not signed with the run's key")
    here = Path(local_dir(config)) / f"{step_name(anchor.version)}-{anchor.attempt}"
    checkpoint = FoundCheckpoint(anchor.version, str(here), folder, manifest)
    reader = ShardReader(checkpoint, ranged=True, by_sha256=True)
    for name in reader.names():
        model.tensors[name].view(-1).copy_(reader.read("master", name))
