"""Two ranks that bring base weights from a hub into a sharded model, each with a cache of its own, as on two
nodes.

Runs inside scenarios.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import deepspeed
import huggingface_hub.constants
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

from trainer.config import ConfigError
from trainer.hardware import model_shapes
from trainer.learning.policy import init_distributed
from trainer.learning.zero import base_weights
from trainer.learning.zero.setup import zero_config
from trainer.storage import hub
from trainer.system.backoff import Backoff
from trainer.system.errors import StorageError

KINDS = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)


def filled_weights(config, rank, port):
    """Tensors that differ from those that transformers loads, and the files that this rank downloaded; or the
    error and its type.

    The configuration's remote is the hub that the weights come from, under the name that its run has.
    """
    folder, dtype = (
        Path(config.model.path),
        {"fp32": torch.float32, "bf16": torch.bfloat16}[config.model.dtype],
    )
    about = transformers.AutoConfig.from_pretrained(folder)
    kind = KINDS[not hasattr(about, "vision_config")]
    plain = dict(kind.from_pretrained(folder, dtype=dtype).named_parameters())
    cache = Path(config.run.dir) / f"cache-{rank}"
    huggingface_hub.constants.HF_HUB_CACHE = str(cache)
    os.environ |= {
        "HF_ENDPOINT": config.checkpoint.remote,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    init_distributed("cpu")
    ds_config = zero_config(config, model_shapes.from_config(about.to_dict()))
    keep = HfDeepSpeedConfig(ds_config)
    model = base_weights.build_unfilled(kind, about, ds_config, dtype=dtype)
    assert keep.is_zero3()
    base_weights.BUCKET_BYTES = 1 << 16
    hub.TRIES = Backoff(attempts=1)
    try:
        base_weights.fill_weights(model, replace(config, model=replace(config.model, path=config.run.name)))
    except (ConfigError, StorageError) as error:
        return {"error": str(error), "type": type(error).__name__}
    ours = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(ours.values())):
        different = [name for name in ours if not torch.equal(ours[name].data, plain[name].data)]
    files = {path.name: path.stat().st_size for path in cache.rglob("*.safetensors")}
    return {"different": different, "same_names": ours.keys() == plain.keys(), "files": files}
