"""What can be checked of a configuration without touching disk or devices, in one place."""

from __future__ import annotations

from trainer.config.overrides import ConfigError
from trainer.config.schema import RunConfig


def validate(config: RunConfig) -> None:
    """Raises ConfigError, with the change to make, if the configuration cannot run."""
    c, world = config, config.placement.world_size
    positive = {
        "placement.nodes": c.placement.nodes,
        "placement.workers_per_node": c.placement.workers_per_node,
        "rollout.prompts_per_step": c.rollout.prompts_per_step,
        "rollout.samples_per_prompt": c.rollout.samples_per_prompt,
        "rollout.max_tokens": c.rollout.max_tokens,
        "rollout.tensor_parallel": c.rollout.tensor_parallel,
        "optimizer.hpz_ranks": c.optimizer.hpz_ranks,
        "algorithm.epochs": c.algorithm.epochs,
        "data.episodes": c.data.episodes,
        "data.prompt_max_tokens": c.data.prompt_max_tokens,
        "checkpoint.keep_last": c.checkpoint.keep_last,
        "rewards.workers": c.rewards.workers,
        "rewards.deadline_s": c.rewards.deadline_s,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    if c.optimizer.learning_rate < 0:
        raise ConfigError(f"optimizer.learning_rate is {c.optimizer.learning_rate}: it must not be negative")
    if not 0 < c.rollout.gpu_memory_utilization < 1:
        raise ConfigError(
            f"rollout.gpu_memory_utilization is {c.rollout.gpu_memory_utilization}: choose between 0 and 1"
        )
    if c.rollout.temperature > 2:
        raise ConfigError(f"rollout.temperature is {c.rollout.temperature}: vLLM takes at most 2")
    if c.rollout.temperature <= 0:
        raise ConfigError(
            "rollout.temperature must be above 0: a group of greedy answers has no variance to learn from"
        )
    if c.model.min_pixels > c.model.max_pixels:
        raise ConfigError(f"model.min_pixels {c.model.min_pixels} > model.max_pixels {c.model.max_pixels}: swap them")
    for name, count in (
        ("algorithm.micro_batch_tokens", c.algorithm.micro_batch_tokens),
        ("algorithm.logprob_tokens", c.algorithm.logprob_tokens),
        ("optimizer.live_parameters", c.optimizer.live_parameters),
        ("optimizer.max_skipped_updates", c.optimizer.max_skipped_updates),
    ):
        if count < 0:
            raise ConfigError(f"{name} is {count}: it must not be negative")
    if c.placement.workers_per_node % c.optimizer.hpz_ranks:
        raise ConfigError(
            f"optimizer.hpz_ranks {c.optimizer.hpz_ranks} does not divide the {c.placement.workers_per_node} ranks of "
            f"a node: use a divisor of {c.placement.workers_per_node}"
        )
    if c.method == "sft":
        return
    if c.rollout.samples_per_prompt < 2:
        raise ConfigError("rollout.samples_per_prompt is 1: a group of one has no advantage; use at least 2")
    if world % c.rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel {c.rollout.tensor_parallel} does not divide the {world} workers: "
            f"use a divisor of {world}"
        )
    engines = world // c.rollout.tensor_parallel
    if c.rollout.prompts_per_step % engines:
        raise ConfigError(
            f"rollout.prompts_per_step {c.rollout.prompts_per_step} does not divide by the {engines} engines: "
            f"use a multiple of {engines}"
        )
    if c.samples_per_step % c.samples_per_update:
        raise ConfigError(
            f"algorithm.samples_per_update {c.samples_per_update} does not divide the {c.samples_per_step} samples of "
            f"a step (prompts_per_step x samples_per_prompt): use a divisor of {c.samples_per_step}"
        )


def validate_saving(config: RunConfig) -> None:
    """Refuses a run that could not resume: every node writes its own part, and a new node has none of them."""
    if config.placement.nodes > 1 and not config.checkpoint.remote and not config.checkpoint.shared_files:
        raise ConfigError(
            f"placement.nodes is {config.placement.nodes} and checkpoint.remote is empty, so no new node could resume: "
            "set it to a bucket, or checkpoint.shared_files to true where all nodes see run.dir"
        )
