"""A run's configuration as a file, and what follows from it for its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from trainer.config.lora import LoRA
from trainer.config.overrides import from_dict, read_yaml, to_dict
from trainer.config.resume import of_today
from trainer.config.schema import RunConfig
from trainer.config.validation import validate
from trainer.system.errors import ConfigError


def load(path: str | Path) -> RunConfig:
    """Reads a resolved configuration, of an older version too. Raises ConfigError if the file is missing, not
    YAML or not valid."""
    try:
        data = read_yaml(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {(str(error).splitlines() or ['too deep'])[0]}") from None
    config = from_dict(RunConfig, of_today(data) if isinstance(data, dict) else data or {})
    validate(config)
    return config


def dump(config: RunConfig) -> str:
    """YAML of the resolved configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def checkpoint_holds_policy(config: RunConfig) -> bool:
    """Whether a checkpoint has every weight of the policy: all are trained."""
    return not (config.lora.rank or config.model.freeze_vision)


def checkpoint_suffices(config: RunConfig) -> bool:
    """Whether a resume needs no base weights: no reference keeps them either."""
    return checkpoint_holds_policy(config) and not (config.method == "grpo" and config.algorithm.kl_coef)


def of_teacher(config: RunConfig) -> RunConfig:
    """The configuration with the teacher as its model, whole and frozen: what loads, downloads and measures a
    run's model does so for its teacher."""
    algorithm = config.algorithm
    model = replace(config.model, path=algorithm.teacher, revision=algorithm.teacher_revision)
    alone = replace(algorithm, teacher="", teacher_revision="")
    return replace(config, model=model, lora=LoRA(), algorithm=alone)


def by_model(config: RunConfig) -> list[RunConfig]:
    """One configuration per pretrained model that the run reads: its own, and that of its teacher."""
    return [config, of_teacher(config)] if config.teaches else [config]


def nodes_share_weights(config: RunConfig) -> bool:
    """Whether each file of base weights is read on one node, which passes it on: ZeRO-3 keeps a slice on
    every rank."""
    return config.optimizer.zero_stage == 3 and not config.lora.qlora
