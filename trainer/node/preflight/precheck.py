"""Checks before anything is started: model, data, memory, disk. Each failure is one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainer.checkpoint.layout import held_bytes, local_dir
from trainer.config import ConfigError, RunConfig, of_teacher, validate_saving
from trainer.config.budget import checkpoints_bytes, trained, written_checkpoints
from trainer.config.run_store import is_hub_name
from trainer.data.dataset import Dataset
from trainer.hardware import architectures
from trainer.hardware.model_shapes import shape_of
from trainer.node.preflight import host
from trainer.storage import hub

BYTES_PER_PARAMETER = 32
"""CPU bytes in fp32: weights, master, moments, gradient, reference, engine, gathered copy."""
ENGINE_BYTES = 4
"""The engine's part of them. Where rollout workers sample, the trainer has none."""
WORKER_BYTES = 8
"""What a rollout worker beside the ranks takes: its copy of the weights, and its engine's."""
TEACHER_BYTES = 8
"""The same of a teacher: its weights, and its gathered copy."""


def precheck(config: RunConfig) -> None:
    """Raises ConfigError naming the change to make. Reads the disk, never a device or the network."""
    validate_saving(config)
    parameters = _parameters(config)
    teacher = _parameters(of_teacher(config), "algorithm.teacher") if config.teaches else 0
    train = Dataset(config.data.path, config.data.split)
    if not len(train):
        raise ConfigError(f"{config.data.path} has no rows in split {config.data.split}: prepare it again")
    if config.method == "grpo" and train.manifest.settings.get("sft"):
        raise ConfigError(
            f"{config.data.path} was prepared with --sft and has no answers to grade against: set method to "
            "sft, or prepare it without"
        )
    if len(train) < config.rows_per_step and not config.evaluation.pass_rate_samples:
        key = "sft.batch_size" if config.method == "sft" else "rollout.prompts_per_step"
        raise ConfigError(
            f"{config.data.path} has {len(train)} rows in split {config.data.split} and a step takes "
            f"{config.rows_per_step}: lower {key}"
        )
    if config.evaluation.every_steps and not len(Dataset(config.evaluation_path, config.evaluation.split)):
        raise ConfigError(
            f"{config.evaluation_path} has no rows in split {config.evaluation.split}: nothing to score"
        )
    _disk(config, parameters)
    if config.placement.device == "cpu":
        _memory(config, parameters if config.loads_policy else 0, teacher)


def _parameters(config: RunConfig, option: str = "model.path") -> int:
    """Number of the model's parameters, whatever their type in the files; 0 if they are not on this disk.

    option: what names the model.
    """
    path = Path(config.model.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{option} {path} has no config.json: give a Hugging Face model folder")
        count = sum(map(hub.parameters_in, path.glob("*.safetensors")))
        if not count:
            raise ConfigError(f"{option} {path} has no *.safetensors weights: download them again")
        architectures.check_path(str(path))
        return count
    if not is_hub_name(config.model.path):
        raise ConfigError(f"{option} {config.model.path} is neither a folder nor a hub id (owner/name)")
    architectures.check_path(config.model.path)
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        _cached(config, option)
    return 0


def _cached(config: RunConfig, option: str) -> None:
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(config.model.path, "config.json"), str):
        raise ConfigError(f"{option} {config.model.path} is not on this disk, and the hub is switched off")


def _disk(config: RunConfig, parameters: int) -> None:
    folder = Path(config.run.dir).resolve()
    while not folder.exists():
        folder = folder.parent
    shape = shape_of(config.model.path) if config.lora.rank and parameters else None
    if shape:
        parameters = trained(config, shape)
    held = held_bytes(local_dir(config))  # a resumed run's own are among the kept ones
    need = checkpoints_bytes(config, parameters, held)
    written = written_checkpoints(config)
    needs = "a checkpoint needs" if written == 1 else f"{written} checkpoints need"
    free = shutil.disk_usage(folder).free
    if need > free + held:
        raise ConfigError(
            f"{needs} {need / 2**30:.2f} GiB and {folder} has {(free + held) / 2**30:.2f} for"
            " them: point run.dir at a larger disk, or lower checkpoint.keep_last"
        )


def _memory(config: RunConfig, parameters: int, teacher: int) -> None:
    ranks = config.placement.workers_per_node
    caches = ranks * config.rollout.kv_cache_gib * 2**30
    bytes_each = BYTES_PER_PARAMETER
    if config.fleet.workers == "only":
        caches = 0
        bytes_each -= ENGINE_BYTES
    own = config.fleet.gpus_per_node
    caches += own * (config.rollout.kv_cache_gib * 2**30 + parameters * WORKER_BYTES)
    need = host.memory_bytes(config) + caches + parameters * bytes_each + teacher * TEACHER_BYTES
    free = host.available_memory()
    if need > free:
        raise ConfigError(
            f"{ranks} CPU ranks need about {need / 2**30:.1f} GiB of memory and {free / 2**30:.1f} are free: "
            "lower placement.workers_per_node, rollout.kv_cache_gib or data.image_cache_gib, or close other "
            "programs"
        )
