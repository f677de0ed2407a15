"""Pretrained weights for a model that ZeRO-3 shards. One rank reads each file, and only that rank's node
needs to have it.

transformers has rank 0 read all files but has every rank open them, so that every node would download the
whole model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state

from trainer.config import ConfigError, RunConfig
from trainer.hardware import architectures
from trainer.learning.zero import private_names
from trainer.learning.zero.partition import bucket_parameters, whole_shape
from trainer.storage import expert_files, hub
from trainer.system.errors import StorageError

T = TypeVar("T")
BUCKET_BYTES = 512 << 20
"""Bytes of weights that are whole on every rank at a time while they are loaded; a larger tensor is loaded
alone."""
PERMANENT = (ConfigError, FileNotFoundError, PermissionError, SafetensorError)
"""Errors of a reader that another start would meet again."""


def build_unfilled(kind: Any, hf_config: Any, ds_config: dict[str, Any], **kwargs: Any) -> Any:
    """Builds a model of one of transformers' auto classes, sharded as it is built. Its weights are not set
    yet."""
    copies_within_node = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    # Where an earlier call has made this group, DeepSpeed must be given it: it refuses to make a second one.
    node_group = private_names.node_group() if copies_within_node else None
    # Imports the model's class before `Init` begins. `Init` restores every class that is defined within it,
    # and takes away the `__init__` that a decorator gave to the class: the next model would be built wrongly.
    kind._model_mapping.get(type(hf_config), None)
    sharded = deepspeed.zero.Init(config_dict_or_path=ds_config, zero_param_parallel_group=node_group)
    with no_init_weights(), sharded, set_zero3_state():
        model = kind.from_config(hf_config, **kwargs)
    model.tie_weights()  # `no_init_weights` leaves this out
    return model


@torch.no_grad()
def copy_weights(read: nn.Module, unread: nn.Module) -> None:
    """Gives a model the weights of another one of the same class, shard by shard: nothing is gathered."""
    weights: dict[str, Any] = dict(read.named_parameters())
    unread_weights: dict[str, Any] = dict(unread.named_parameters())
    assert weights.keys() == unread_weights.keys(), "two models of one configuration differ in their weights"
    for name, parameter in unread_weights.items():
        shard = getattr(parameter, "ds_tensor", parameter)
        shard.data.copy_(getattr(weights[name], "ds_tensor", weights[name]).data)


@torch.no_grad()
def fill_weights(model: nn.Module, config: RunConfig) -> None:
    """Brings the pretrained weights into a sharded model. Collective. Raises, on every rank: ConfigError for
    a file that the model lacks, the hub refuses or nobody can read, and for tensors that the files lack;
    StorageError for a hub or disk that failed, which another start may find well."""
    names = _read_by_every_rank(config, lambda: hub.weight_files(config) if dist.get_rank() == 0 else [])[0]
    files = _opened(names, config)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= file.shapes

    parameters = dict(model.named_parameters())
    about: Any = model.config
    layout = architectures.FAMILIES[about.model_type].experts
    places = _matched(parameters, shapes, layout, config)
    for file in files:
        _fill_from(file, parameters, places)


@dataclass(frozen=True)
class _File:
    """A file of weights, as a rank knows it."""

    reader: int
    """The rank that reads it."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor in it."""
    opened: Any
    """safetensors' handle on the rank that reads it, else None."""


def _opened(names: list[str], config: RunConfig) -> list[_File]:
    """Opens this rank's share of the files. Every rank gets all files with their shapes, in the order of
    `names`. Collective."""
    readers = _readers(len(names), config.placement.workers_per_node)
    opened: dict[str, Any] = {}

    def open_own() -> dict[str, dict[str, tuple[int, ...]]]:
        for name, reader in zip(names, readers, strict=True):
            if reader == dist.get_rank():
                opened[name] = safe_open(hub.model_file(config, name), framework="pt")
        return {name: _shapes(handle) for name, handle in opened.items()}

    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for of_rank in _read_by_every_rank(config, open_own):
        shapes |= of_rank
    return [
        _File(reader, shapes[name], opened.get(name)) for name, reader in zip(names, readers, strict=True)
    ]


def _fill_from(file: _File, parameters: dict[str, Any], places: dict[str, expert_files.TensorPlace]) -> None:
    """Brings a file's tensors into the sharded parameters, a bucket of them at a time. Collective."""
    keys: dict[str, list[str]] = {}
    for key in file.shapes:
        if key in places:
            keys.setdefault(places[key].name, []).append(key)

    wanted = [(name, parameters[name]) for name in keys]
    for bucket in bucket_parameters(wanted, BUCKET_BYTES):
        gathered = [parameter for _, parameter in bucket]
        # The reader changes the whole parameters; leaving the block scatters its values to all ranks.
        with deepspeed.zero.GatheredParameters(gathered, modifier_rank=file.reader):
            if file.opened is not None:
                for name, parameter in bucket:
                    for key in keys[name]:
                        places[key].inside(parameter.data).copy_(file.opened.get_tensor(key))


def _readers(count: int, per_node: int) -> list[int]:
    """The rank that reads each of `count` files. `model_fetch` deals the files to the nodes; a node's ranks
    read its files in turn. Collective."""
    node = int(os.environ.get(hub.NODE_VARIABLE, dist.get_rank() // per_node))
    ranks: dict[int, list[int]] = {}
    for rank, rank_node in enumerate(_from_every_rank(node)):
        ranks.setdefault(rank_node, []).append(rank)
    nodes = [on_node for _, on_node in sorted(ranks.items())]
    readers = []
    for file in range(count):
        turn, node = divmod(file, len(nodes))
        readers.append(nodes[node][turn % len(nodes[node])])
    return readers


def _shapes(handle: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in an opened file; reads no tensor."""
    return {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118


def _matched(
    parameters: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    layout: expert_files.Layout,
    config: RunConfig,
) -> dict[str, expert_files.TensorPlace]:
    """Where each tensor of the files lies in the parameters; they fill every parameter. Other tensors of the
    files are ignored, as transformers does."""
    places = {}
    filled = dict.fromkeys(parameters, 0)  # number of elements, by parameter
    for key, shape in shapes.items():
        place = expert_files.tensor_place(key, layout)
        known_as = sorted(hub.key_aliases(place.name) & parameters.keys())
        if not known_as:
            continue
        whole = whole_shape(parameters[known_as[0]])
        # Files may have experts either way: transformers reads both, and writes what its modules have.
        place = replace(place, name=known_as[0], transposed=place.transposed and shape != whole)
        places[key] = place
        expected = tuple(place.inside(torch.empty(whole, device="meta")).shape)
        if shape != expected:
            raise ConfigError(f"{config.model.path}: {key} is {shape}, not {expected}")
        filled[known_as[0]] += math.prod(shape)

    missing = [name for name, p in parameters.items() if filled[name] < math.prod(whole_shape(p))]
    if missing:
        raise ConfigError(
            f"{config.model.path} has no {min(missing)} ({len(missing)} are missing): is it this model?"
        )
    return places


def _read_by_every_rank(config: RunConfig, read: Callable[[], T]) -> list[T]:
    """What `read` returns on every rank, by rank. Collective. If `read` fails on any rank, every rank raises
    that error: as ConfigError if it is PERMANENT, else as StorageError. ConfigErrors go first."""
    value: T | None = None
    failure: ConfigError | StorageError | None = None
    try:
        value = read()
    except Exception as error:  # of any kind: the other ranks wait to be told
        kind = ConfigError if isinstance(error, PERMANENT) else StorageError
        reason = str(error) if isinstance(error, (*PERMANENT, StorageError)) else repr(error)
        failure = kind(f"rank {dist.get_rank()} cannot read the weights of {config.model.path}: {reason}")

    outcomes = _from_every_rank((value, failure))
    failures = [of_rank for _, of_rank in outcomes if of_rank is not None]
    if failures:
        raise min(failures, key=lambda of_rank: not isinstance(of_rank, ConfigError))
    return [of_rank for of_rank, _ in outcomes]


def _from_every_rank(value: Any) -> list[Any]:
    """The objects that all ranks have passed in, by rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out
