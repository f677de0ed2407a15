"""Whole weights that a worker can begin with: the pretrained model, or a checkpoint of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.errors import CorruptCheckpoint
from trainer.checkpoint.layout import local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import unpack
from trainer.checkpoint.reader import Found, ShardReader
from trainer.config import RunConfig
from trainer.fleet.objects import Anchor
from trainer.storage import hub
from trainer.storage.storage import Storage


def pretrained(config: RunConfig) -> dict[str, Tensor]:
    """Every parameter of the pretrained model by the policy's names, on the host, in the run's type.

    Loaded by the classes that the policy is loaded by, so that names and values are the policy's own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = config.model
    if hub.from_hub(config):
        hub.fetch(config, hub.weight_files(config))
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    arguments: dict[str, Any] = {"dtype": dtype} | ({"revision": model.revision} if model.revision else {})
    try:
        loaded = AutoModelForImageTextToText.from_pretrained(model.path, **arguments)
    except ValueError:  # not a vision-language architecture
        loaded = AutoModelForCausalLM.from_pretrained(model.path, **arguments)
    return {name: parameter.detach().contiguous() for name, parameter in loaded.named_parameters()}


@torch.no_grad()
def fill(tensors: dict[str, Tensor], config: RunConfig, anchor: Anchor) -> None:
    """Brings an anchor's weights into `tensors`, which hold the pretrained model or a later version of it.

    A checkpoint holds the trained parameters in fp32: rounded they are the weights that were published.
    Raises CorruptCheckpoint, StorageError; FileNotFoundError where the checkpoint is gone.
    """
    if anchor.kind == "model":
        for name, tensor in pretrained(config).items():
            tensors[name].copy_(tensor)
        return
    folder = f"{remote_url(config)}/{remote_folder(anchor.version, anchor.attempt)}"
    manifest = unpack(Storage(folder).get_bytes("manifest.json"))
    if manifest is None or manifest["step"] != anchor.version:
        raise CorruptCheckpoint(f"{folder}/manifest.json is damaged")
    here = Path(local_dir(config)) / f"{step_name(anchor.version)}-{anchor.attempt}"
    reader = ShardReader(Found(anchor.version, str(here), folder, manifest), ranged=True)
    for name in reader.names():
        tensors[name].view(-1).copy_(reader.read("master", name))
