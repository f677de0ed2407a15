"""Each option of a run, changed between a checkpoint and the run that resumes from it: allowed, or refused in
the sentence that says which, and what to do."""

from __future__ import annotations

import dataclasses

import pytest

from tests.checkpoint.synthetic import again, configure, save, writers
from trainer import config as c
from trainer.checkpoint.course import refuse_other
from trainer.checkpoint.manifest import manifests_here
from trainer.config.overrides import to_dict

SECTIONS = {"checkpoint", "placement", "logging", "watch", "guards", "expected", "evaluation", "fleet"}
"""Sections that say where a run computes, what is kept and what is told."""
ALLOWED = {
    "run": {"dir", "deterministic", "max_steps"},  # max_steps: under a constant learning rate
    "model": {"gradient_checkpointing", "recurrence"},
    "data": {"path", "image_cache_gib"},  # the dataset's fingerprint is compared
    "rollout": {
        *["tensor_parallel", "expert_parallel", "gpu_memory_utilization", "kv_cache_gib", "sleep_level"],
        *["prefix_caching", "eager", "sync_tolerance", "sync_bucket_bytes"],
    },
    "algorithm": {"micro_batch_tokens", "logprob_tokens"},
    "optimizer": {
        *["zero_stage", "live_parameters", "hpz_ranks", "max_skipped_updates", "offload_optimizer"],
        *["offload_reference"],
    },
    "rewards": {
        *["workers", "deadline_s", "max_timeout_rate", "max_error_rate", "remote_url", "judge_timeout_s"],
        *["judge_requests"],
    },
    "turns": {"tool_workers", "python"},
}
ELSEWHERE = {"run.id", "run.name", "model.path"}
"""Another id is another run, and a model is compared by what it holds (test_resume_options.py)."""

OPTIONS = [
    f"{section}.{key}"
    for section, values in to_dict(c.RunConfig()).items()
    if isinstance(values, dict)
    for key in values
]


def changed(config: c.RunConfig, name: str) -> c.RunConfig:
    """The configuration with another value for one option."""
    section, _, key = name.partition(".")
    part = getattr(config, section)
    value = getattr(part, key)
    match value:
        case bool():
            other = not value
        case int() | float():
            other = value + 1
        case tuple() if key == "functions":
            other = (c.RewardFunction(path="mine.py:reward"),)
        case tuple():
            other = (*value, 0.5)
        case _:
            other = f"{value}other"
    return dataclasses.replace(config, **{section: dataclasses.replace(part, **{key: other})})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run's configuration and the manifest of its checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    config = configure(folder)
    checkpoints = again(config, [])
    save(checkpoints, writers(config, 2), 2)
    return config, manifests_here(checkpoints.folder)[2]


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - ELSEWHERE))
def test_an_option_is_allowed_or_refused_by_name(checkpoint, name):
    """A new option is refused until this table says why not."""
    config, manifest = checkpoint
    section, _, key = name.partition(".")
    now = changed(config, name)
    if section in SECTIONS or key in ALLOWED.get(section, ()):
        refuse_other(now, "data", manifest, print)
        return
    with pytest.raises(c.ConfigError) as error:
        refuse_other(now, "data", manifest, print)
    said = str(error.value)
    assert said.startswith(f"cannot resume run test from step 2: {name} is ")
    assert said.endswith(": set it back, or choose another run.id") and "\n" not in said
    is_now, _, was = said.partition(", the checkpoint has ")
    assert is_now.rpartition(" is ")[2] != was.partition(": set it back")[0]
    assert "True" not in said or isinstance(getattr(getattr(now, section), key), bool), (
        "an address is no bool"
    )


def test_another_method_is_refused(checkpoint):
    config, manifest = checkpoint
    with pytest.raises(c.ConfigError, match="method is 'sft', the checkpoint has 'grpo': set it back"):
        refuse_other(dataclasses.replace(config, method="sft"), "data", manifest, print)


def test_other_data_are_refused(checkpoint):
    config, manifest = checkpoint
    with pytest.raises(c.ConfigError, match="the data at rows is not what the checkpoint was trained on"):
        refuse_other(config, "others", manifest, print)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("optimizer.schedule=cosine", "optimizer.schedule cosine decays over it"),
        ("optimizer.warmup_ratio=0.1", "optimizer.warmup_ratio is a share of it"),
    ],
)
def test_the_length_is_refused_where_the_learning_rate_goes_by_it(tmp_path, option, why):
    config = configure(tmp_path, option)
    manifest = {"step": 2, "config": c.resume_view(config)}
    with pytest.raises(c.ConfigError, match=rf"run\.max_steps is .* \({why}\): set it back"):
        refuse_other(changed(config, "run.max_steps"), "data", manifest, print)
