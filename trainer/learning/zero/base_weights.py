"""Pretrained weights for a model that ZeRO-3 shards: every file is read by one rank, on whose node alone it
must be.

transformers has rank 0 read all of them, but has every rank open them: every node would download the whole
model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state

from trainer.config import ConfigError, RunConfig
from trainer.errors import StorageError
from trainer.learning.zero.partition import buckets, whole_shape
from trainer.storage import hub

T = TypeVar("T")
BUCKET_BYTES = 512 << 20
"""Bytes of weights that are whole on every rank at a time while they are loaded; a larger tensor is loaded
alone."""
PERMANENT = (ConfigError, FileNotFoundError, PermissionError, SafetensorError)
"""Errors of a reader that another start would meet again."""


def unfilled(kind: Any, hf_config: Any, ds_config: dict[str, Any], **kwargs: Any) -> Any:
    """Builds a model of one of transformers' auto classes, sharded as it is built. Its weights are not set
    yet."""
    split = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    # of an earlier call; no second is made
    node = groups._get_zero_param_intra_parallel_group() if split else None
    sharded = deepspeed.zero.Init(config_dict_or_path=ds_config, zero_param_parallel_group=node)
    with no_init_weights(), sharded, set_zero3_state():
        model = kind.from_config(hf_config, **kwargs)
    model.tie_weights()  # left out with the initialization
    return model


@torch.no_grad()
def fill(model: nn.Module, config: RunConfig) -> None:
    """Brings the pretrained weights into a sharded model. Collective.

    Raises, on every rank: ConfigError for a file that the model lacks, the hub refuses or nobody can read,
    and for tensors that the files lack; StorageError for a hub or disk that failed, which another start may
    find well.
    """
    files = _told(config, lambda: hub.weight_files(config) if dist.get_rank() == 0 else [])[0]
    owners = dict(zip(files, _readers(len(files), config.placement.workers_per_node), strict=True))
    opened: dict[str, Any] = {}

    def read() -> dict[str, dict[str, tuple[int, ...]]]:
        for name, owner in owners.items():
            if owner == dist.get_rank():
                opened[name] = safe_open(hub.file(config, name), framework="pt")
        return {name: _shapes(file) for name, file in opened.items()}

    by_file: dict[str, dict[str, tuple[int, ...]]] = {}
    for part in _told(config, read):
        by_file |= part
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= by_file[name]

    parameters = dict(model.named_parameters())
    keys = _matched(parameters, shapes, config)
    for name, owner in owners.items():
        wanted = [(key, parameters[keys[key]]) for key in by_file[name] if key in keys]
        for bucket in buckets(wanted, BUCKET_BYTES):
            gathered = [parameter for _, parameter in bucket]
            # The owner changes the whole parameters; leaving the block scatters its values to all ranks.
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=owner):
                if name in opened:
                    for key, parameter in bucket:
                        parameter.data.copy_(opened[name].get_tensor(key))


def _readers(count: int, per_node: int) -> list[int]:
    """The rank that reads each of `count` files: of the node to which `model_fetch` deals it, the ranks in
    turn."""
    node = int(os.environ.get(hub.NODE_VARIABLE, dist.get_rank() // per_node))
    ranks: dict[int, list[int]] = {}
    for rank, place in enumerate(_everyone(node)):
        ranks.setdefault(place, []).append(rank)
    nodes = [ranks[place] for place in sorted(ranks)]
    readers = []
    for file in range(count):
        on_node = nodes[file % len(nodes)]
        turn = file // len(nodes)
        readers.append(on_node[turn % len(on_node)])
    return readers


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _matched(
    parameters: dict[str, Any], shapes: dict[str, tuple[int, ...]], config: RunConfig
) -> dict[str, str]:
    """Maps tensors of the files to parameters, for every parameter. Other tensors of the files are
    ignored, as transformers does."""
    keys = {}
    for key in shapes:
        own = sorted(hub.aliases(key) & parameters.keys())
        if own:
            keys[key] = own[0]
    if missing := sorted(parameters.keys() - set(keys.values())):
        raise ConfigError(
            f"{config.model.path} has no {missing[0]} ({len(missing)} are missing): is it this model?"
        )
    for key, name in keys.items():
        expected = whole_shape(parameters[name])
        if shapes[key] != expected:
            raise ConfigError(f"{config.model.path}: {key} is {shapes[key]}, not {expected}")
    return keys


def _told(config: RunConfig, read: Callable[[], T]) -> list[T]:
    """What every rank has read, by rank. Raises on every rank what one raises: PERMANENT as ConfigError, else
    StorageError."""
    own: tuple[Any, Any] = None, None
    try:
        own = read(), None
    except Exception as error:  # of any kind: the other ranks wait to be told
        kind = ConfigError if isinstance(error, PERMANENT) else StorageError
        said = str(error) if isinstance(error, (*PERMANENT, StorageError)) else repr(error)
        own = None, kind(f"rank {dist.get_rank()} cannot read the weights of {config.model.path}: {said}")
    told = _everyone(own)
    if failures := [failure for _, failure in told if failure]:
        raise next((one for one in failures if isinstance(one, ConfigError)), failures[0])
    return [found for found, _ in told]


def _everyone(own: Any) -> list[Any]:
    """The objects that all ranks have passed in, by rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, own)
    return out
