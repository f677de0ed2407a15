"""A run's configuration as a file, and what of it a resumed run must share with its checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from trainer.config.overrides import from_dict, to_dict
from trainer.config.schema import RunConfig
from trainer.config.validation import validate
from trainer.errors import ConfigError


def load(path: str | Path) -> RunConfig:
    """Reads a resolved configuration. Raises ConfigError if the file is missing, not YAML or not valid."""
    try:
        data = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    config = from_dict(RunConfig, data or {})
    validate(config)
    return config


def dump(config: RunConfig) -> str:
    """YAML of the resolved configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


RESUME_IGNORES = (
    "run.dir",
    "checkpoint",
    "placement",
    "logging",
    "watch",
    "guards",
    "evaluation",
    "rewards.workers",
    "rewards.deadline_s",
    "rewards.max_timeout_rate",
    "rewards.remote_url",
    "rewards.judge_requests",
    "rewards.judge_timeout_s",
    "data.image_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_gib",
    "rollout.sync_bucket_bytes",
    "rollout.sync_tolerance",
    "rollout.tensor_parallel",
    "rollout.sleep_level",
    "rollout.eager",
    "rollout.prefix_caching",
    "optimizer.zero_stage",
    "optimizer.offload_optimizer",
    "optimizer.offload_reference",
    "optimizer.live_parameters",
    "model.gradient_checkpointing",
    "optimizer.hpz_ranks",
    "optimizer.max_skipped_updates",
    "algorithm.micro_batch_tokens",
    "algorithm.logprob_tokens",
)
"""Fields that may differ between a checkpoint and the run that resumes from it: they change where and how
fast, not what is computed."""


def resume_view(config: RunConfig) -> dict[str, Any]:
    """The part of a configuration that a resumed run must share with its checkpoint, flat: {"section.key":
    value}.

    The length of the run belongs to it where the learning rate goes by it; with a constant one it may change.
    So may the address of a judge, as long as there is one.
    """
    flat: dict[str, Any] = {}
    for section, values in to_dict(config).items():
        if not isinstance(values, dict):
            flat[section] = values
            continue
        flat |= {f"{section}.{key}": value for key, value in values.items()}
    return compared(flat)


def compared(flat: dict[str, Any]) -> dict[str, Any]:
    """What of a flat configuration a resume compares; a checkpoint of older code may hold more."""
    constant = flat.get("optimizer.schedule") == "constant" and not flat.get("optimizer.warmup_ratio")
    ignores = RESUME_IGNORES + (("run.max_steps",) if constant else ())
    ignored = lambda key: any(key == p or key.startswith(p + ".") for p in ignores)  # noqa: E731
    whether = lambda key, value: bool(value) if key == "rewards.judge_url" else value  # noqa: E731
    return {key: whether(key, value) for key, value in flat.items() if not ignored(key)}


def checkpoint_holds_policy(config: RunConfig) -> bool:
    """Whether a checkpoint has every weight of the policy: all are trained."""
    return not (config.lora.rank or config.model.freeze_vision)


def checkpoint_suffices(config: RunConfig) -> bool:
    """Whether a resume needs no base weights: no reference keeps them either."""
    return checkpoint_holds_policy(config) and not (config.method == "grpo" and config.algorithm.kl_coef)


def nodes_share_weights(config: RunConfig) -> bool:
    """Whether each file of base weights is read on one node, which passes it on: ZeRO-3 keeps a slice on
    every rank."""
    return config.optimizer.zero_stage == 3 and not config.lora.qlora


def fingerprint(config: RunConfig) -> str:
    """sha256 of `resume_view`."""
    return hashlib.sha256(json.dumps(resume_view(config), sort_keys=True).encode()).hexdigest()
