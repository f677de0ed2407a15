"""What a resumed run must share with its checkpoint, whichever version of the code wrote that.

A checkpoint outlives the code. It records the options that it was trained with; later versions know more of
them, or other ones. The tables below say what such a record means today. Where things lie is never compared:
the same data may be in another clone's folder, so data and model are compared by what they hold
(trainer/checkpoint/course.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath
from typing import Any

from trainer.config.overrides import to_dict
from trainer.config.schema import RunConfig

RESUME_IGNORES = (
    *("checkpoint", "placement", "logging", "watch", "guards", "expected", "evaluation", "fleet"),
    *(
        "run.dir",
        "run.deterministic",
        "data.path",
        "data.image_cache_gib",
        "turns.tool_workers",
        "turns.python",
    ),
    *("rewards.workers", "rewards.deadline_s", "rewards.max_timeout_rate", "rewards.max_error_rate"),
    *("rewards.remote_url", "rewards.judge_requests", "rewards.judge_timeout_s"),
    *("rollout.gpu_memory_utilization", "rollout.kv_cache_gib", "rollout.sync_bucket_bytes"),
    *("rollout.sync_tolerance", "rollout.tensor_parallel", "rollout.expert_parallel", "rollout.sleep_level"),
    *("rollout.eager", "rollout.prefix_caching", "model.gradient_checkpointing", "model.recurrence"),
    *("optimizer.zero_stage", "optimizer.offload_optimizer", "optimizer.offload_reference"),
    *("optimizer.live_parameters", "optimizer.hpz_ranks", "optimizer.max_skipped_updates"),
    *("algorithm.micro_batch_tokens", "algorithm.logprob_tokens"),
)
"""Options that may differ between a checkpoint and the run that resumes from it: they change where and how
fast, not what is computed. `data.path` is one: the dataset's fingerprint is compared in its place."""

MEANT_BEFORE: dict[str, Any] = {}
"""Options whose default changed its meaning: what a checkpoint that does not name the option was trained
with. Every other option that a checkpoint does not name had today's default: it did not exist yet."""

RENAMED: dict[str, str] = {}
"""Options that have another name today: {name in older checkpoints: name of today}."""

REMOVED: dict[str, tuple[Any, ...]] = {
    "lora.dora": (False,),
    "algorithm.max_token_age": (0,),
    "logging.trackio": ("",),
    "logging.mlflow": ("",),
    "watch.post_mortem": (False,),
    "algorithm.routing_replay": (False,),
    "data.curriculum": (0.0,),
    "data.curriculum_steps": (5,),
    "evaluation.scoring": ("ours",),
    "rewards.tags_weight": (0.0,),
    "rewards.length_weight": (0.0,),
    "rewards.repetition_weight": (0.0,),
    "rewards.repetition_ngram": (40,),
    "checkpoint.asynchronous": (True, False),
}
"""Options that are gone: {name: values of which today's code does the same}."""


def of_today(data: dict[str, Any]) -> dict[str, Any]:
    """A configuration as older code wrote it, under the names of today; {section: {key: value}}. What is left
    under an unknown name is the caller's to refuse."""
    sections = {name: dict(values) if isinstance(values, dict) else values for name, values in data.items()}
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        if key in _options(sections, section):
            new_section, _, new_key = new.partition(".")
            value = sections[section].pop(key)
            sections.setdefault(new_section, {})[new_key] = value
    for name, harmless in REMOVED.items():
        section, _, key = name.partition(".")
        if _options(sections, section).get(key) in harmless and key in _options(sections, section):
            del sections[section][key]
    return sections


def _options(sections: dict[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name)
    return section if isinstance(section, dict) else {}


def resume_view(config: RunConfig) -> dict[str, Any]:
    """The part of a configuration that a resumed run must share with its checkpoint, flat: {"section.key":
    value}.

    The length of the run belongs to it where the learning rate goes by it; with a constant one it may change.
    So may the address of a judge, as long as there is one, and the folder of a reward function or an
    environment.
    """
    return _compared(_flat(config))


def fingerprint(config: RunConfig) -> str:
    """sha256 of `resume_view`."""
    return hashlib.sha256(json.dumps(resume_view(config), sort_keys=True).encode()).hexdigest()


def difference(config: RunConfig, recorded: dict[str, Any]) -> str:
    """Why a run of `config` cannot go on from a checkpoint with these options, as a sentence; empty if it
    can. recorded: `resume_view` as the checkpoint's version of the code wrote it. `model.path` is not looked
    at, nor where `algorithm.teacher` lies if there was one."""
    recorded = {RENAMED.get(key, key): value for key, value in recorded.items()}
    today, defaults = _flat(config), _flat(RunConfig())
    for key in sorted(recorded.keys() - today.keys()):
        if recorded[key] not in REMOVED.get(key, ()):
            return (
                f"{key} is an option that this version does not know, and the checkpoint has it at"
                f" {recorded[key]!r}: resume with the version that wrote it"
            )

    before = _compared({key: recorded.get(key, MEANT_BEFORE.get(key, defaults[key])) for key in today})
    now = _compared(today)
    for key in sorted(now.keys() | before.keys()):
        if key == "model.path" or now.get(key) == before.get(key):
            continue
        if key == "algorithm.teacher" and now.get(key) and before.get(key):
            continue
        why = ""
        if key == "run.max_steps":
            schedule = config.optimizer.schedule
            constant = schedule == "constant"
            why = (
                " (optimizer.warmup_ratio is a share of it)"
                if constant
                else f" (optimizer.schedule {schedule} decays over it)"
            )
        return (
            f"{key} is {now.get(key)!r}, the checkpoint has {before.get(key)!r}{why}: "
            "set it back, or choose another run.id"
        )
    return ""


def _flat(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in to_dict(config).items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[section] = values
    return flat


def _compared(flat: dict[str, Any]) -> dict[str, Any]:
    """What of a flat configuration is compared, in the form that is compared."""
    ignores = RESUME_IGNORES
    if flat["optimizer.schedule"] == "constant" and not flat["optimizer.warmup_ratio"]:
        ignores += ("run.max_steps",)
    out: dict[str, Any] = {}
    for key, value in flat.items():
        if any(key == name or key.startswith(name + ".") for name in ignores):
            continue
        if key == "rewards.judge_url":
            value = "set" if value else ""
        if key in ("rewards.function", "turns.environment"):
            value = PurePath(str(value)).name
        if key == "rewards.functions":
            value = list(map(_without_folder, flat[key]))
        # Older code allowed what has a wrong gradient: k2 and k3 in the reward, a correction per token of an
        # objective of sequences. Such a run goes on with what is right.
        if key == "algorithm.kl_estimator" and flat["algorithm.kl_in"] == "reward":
            value = "k1"
        elif key == "algorithm.kl_estimator":
            value = value or "k3"
        if key == "algorithm.correction_level" and value in ("", "token"):
            value = "geometric" if flat["algorithm.surrogate"] in ("gspo", "gmpo") else "token"
        out[key] = value
    return out


def _without_folder(function: dict[str, Any]) -> dict[str, Any]:
    """One of several reward functions, wherever its file lies."""
    return function | {"path": PurePath(function["path"]).name}
