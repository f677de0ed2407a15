"""What can be checked of a configuration without touching disk or devices, in one place."""

from __future__ import annotations

from trainer.config.algorithm import Algorithm
from trainer.config.bucket_address import BucketAddress, is_address
from trainer.config.expected import check_bands
from trainer.config.overrides import ConfigError
from trainer.config.ranges import check_ranges
from trainer.config.reward_checks import check_rewards, nearest_name
from trainer.config.schema import RunConfig
from trainer.config.turn_checks import refused_turns
from trainer.config.watching import GUARDS


def validate(config: RunConfig) -> None:
    """Raises ConfigError, with the change to make, if the configuration cannot run."""
    c, world = config, config.placement.world_size
    check_ranges(c)
    check_bands(c.expected)
    if c.model.min_pixels > c.model.max_pixels:
        raise ConfigError(
            f"model.min_pixels {c.model.min_pixels} > model.max_pixels {c.model.max_pixels}: swap them"
        )
    if c.data.source and not c.data.path:
        raise ConfigError(
            "data.source is prepared by a recipe (`python3 launch.py up RECIPE --set data.source=...`):"
            f" without one, run `python3 launch.py data prepare {c.data.source}`, and set data.path to what"
            " it made"
        )
    if c.data.max_samples and c.data.max_samples < c.rows_per_step:
        key = "sft.batch_size" if c.method == "sft" else "rollout.prompts_per_step"
        raise ConfigError(
            f"data.max_samples {c.data.max_samples} is less than the {c.rows_per_step} rows of one step:"
            f" raise it, or lower {key}"
        )
    if c.placement.workers_per_node % c.optimizer.hpz_ranks:
        raise ConfigError(
            f"optimizer.hpz_ranks {c.optimizer.hpz_ranks} does not divide the {c.placement.workers_per_node}"
            f" ranks of a node: use a divisor of {c.placement.workers_per_node}"
        )
    if c.optimizer.zero_stage < 3 and c.method == "grpo":
        raise ConfigError(
            f"optimizer.zero_stage is {c.optimizer.zero_stage} with method grpo: reference, offload and"
            " weight sync go by ZeRO-3's shards; set it to 3"
        )
    if c.optimizer.zero_stage < 3 and c.optimizer.hpz_ranks > 1:
        raise ConfigError(
            f"optimizer.hpz_ranks is {c.optimizer.hpz_ranks} at optimizer.zero_stage"
            f" {c.optimizer.zero_stage}, where every GPU has all weights: set it to 1"
        )
    refused = [*_refused_adapters(c), *_refused_fleet(c), *_refused_teacher(c), *_refused_replay(c)]
    refused += refused_turns(c)
    for wrong, change in refused:
        if wrong:
            raise ConfigError(change)
    if c.optimizer.warmup_steps and c.optimizer.warmup_ratio:
        raise ConfigError("optimizer.warmup_steps and optimizer.warmup_ratio are both set: set one to 0")
    check_rewards(c.rewards)
    for name in c.guards.ending:
        if name not in GUARDS:
            raise ConfigError(f"guards.end: {name!r} is no guard; {nearest_name(name, GUARDS)}")
    if c.method == "sft":
        if c.evaluation.pass_rate_samples:
            raise ConfigError("evaluation.pass_rate_samples needs the engine: set method to grpo")
        if c.sft.batch_size < world:
            raise ConfigError(
                f"sft.batch_size {c.sft.batch_size} leaves some of the {world} ranks without a row in every"
                f" step: use at least {world}"
            )
        return
    if 0 < c.evaluation.temperature < 0.01:
        raise ConfigError(
            f"evaluation.temperature is {c.evaluation.temperature}, and vLLM has none between 0 (greedy) and"
            " 0.01"
        )
    if c.evaluation.temperature == 0 and c.evaluation.top_p < 1:
        raise ConfigError(
            f"evaluation.top_p is {c.evaluation.top_p} at evaluation.temperature 0, which takes the likeliest"
            " token: set evaluation.top_p to 1, or a temperature above 0"
        )
    if c.evaluation.temperature == 0 and c.evaluation.samples_per_prompt > 1:
        raise ConfigError(
            f"evaluation.samples_per_prompt is {c.evaluation.samples_per_prompt} at evaluation.temperature 0:"
            " greedy completions of a prompt are all the same; use 1, or a temperature above 0"
        )
    if c.evaluation.scoring == "published" and not c.evaluation.benchmarks:
        raise ConfigError(
            "evaluation.scoring is published and evaluation.benchmarks false: only benchmarks have published"
            " rules; set evaluation.benchmarks to true, or evaluation.scoring to ours"
        )
    if c.evaluation.benchmarks and not c.evaluation.pass_rate_samples:
        raise ConfigError(
            "evaluation.benchmarks is set and evaluation.pass_rate_samples 0: benchmarks are asked by a run"
            " that trains nothing; set evaluation.pass_rate_samples to 1 or more"
        )
    if c.evaluation.benchmarks and c.evaluation.temperature == 0 and c.evaluation.pass_rate_samples > 1:
        raise ConfigError(
            "several greedy completions of a prompt are all the same: use one, or a temperature above 0"
        )
    if c.rollout.samples_per_prompt < 2 and not c.teaches and not c.evaluation.pass_rate_samples:
        raise ConfigError("rollout.samples_per_prompt is 1: a group of one has no advantage; use at least 2")
    if c.fleet.workers != "only":
        _check_engines(c)
    if c.samples_per_step % c.samples_per_update:
        raise ConfigError(
            f"algorithm.samples_per_update {c.samples_per_update} does not divide the {c.samples_per_step}"
            " samples of a step (prompts_per_step x samples_per_prompt): use a divisor of"
            f" {c.samples_per_step}"
        )
    for wrong, change in [*_refused(c.algorithm), *_refused_ahead(c)]:
        if wrong:
            raise ConfigError(change)


def _check_engines(c: RunConfig) -> None:
    """Refuses engines that leave ranks or prompts over. With `fleet.workers=only` the ranks have none, and a
    worker's engine has the ranks that it needs."""
    world = c.placement.world_size
    if world % c.rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel {c.rollout.tensor_parallel} does not divide the {world} ranks: "
            f"use a divisor of {world}"
        )
    if c.rollout.expert_parallel and c.rollout.tensor_parallel == 1:
        raise ConfigError(
            "rollout.expert_parallel deals experts to the GPUs of an engine, and"
            " rollout.tensor_parallel is 1: set it to the GPUs of an engine, or"
            " rollout.expert_parallel to false"
        )
    engines = world // c.rollout.tensor_parallel
    if c.rollout.prompts_per_step % engines:
        raise ConfigError(
            f"rollout.prompts_per_step {c.rollout.prompts_per_step} does not divide by the {engines} engines:"
            f" use a multiple of {engines}"
        )


def _refused_fleet(c: RunConfig) -> list[tuple[bool, str]]:
    """What rollout workers cannot do, and what to change."""
    own = c.fleet.gpus_per_node
    if c.fleet.workers == "off":
        change = f"fleet.gpus_per_node is {own} and fleet.workers off, so they would wait for nothing"
        return [(own > 0, f"{change}: set fleet.workers to only, or fleet.gpus_per_node to 0")]
    return [
        (
            own % c.rollout.tensor_parallel > 0,
            (
                f"an engine of rollout.tensor_parallel {c.rollout.tensor_parallel} does not divide the {own}"
                f" GPUs of a node that sample: set fleet.gpus_per_node to a multiple of"
                f" {c.rollout.tensor_parallel}"
            ),
        ),
        (c.method != "grpo", "fleet.workers is for method grpo, which samples: set it to off"),
        (
            not c.checkpoint.remote,
            (
                "fleet.workers needs a bucket, through which trainer and workers speak: set checkpoint.remote"
                " to one that both reach"
            ),
        ),
    ]


def _refused_teacher(c: RunConfig) -> list[tuple[bool, str]]:
    """What a run with a teacher cannot do, and what to change."""
    a, graded = c.algorithm, c.rewards.accuracy_weight or c.rewards.format_weight
    r = c.rewards
    shaped = r.tags_weight or r.length_weight or r.repetition_weight or a.overlong_buffer
    learns = c.method == "grpo" and not c.evaluation.pass_rate_samples
    return [
        (
            learns and not (graded or shaped or c.teaches),
            (
                "every weight of the rewards is 0 and there is no algorithm.teacher, so all completions earn"
                " the same: set rewards.accuracy_weight or another weight"
            ),
        ),
        (
            not a.teacher and a.teacher_coef != 1,
            f"algorithm.teacher_coef is {a.teacher_coef:g} and algorithm.teacher is empty: name the teacher",
        ),
        (
            bool(a.teacher_revision) and not a.teacher,
            "algorithm.teacher_revision is set and algorithm.teacher is empty: name the teacher too",
        ),
        (
            bool(a.teacher) and c.method != "grpo",
            "algorithm.teacher judges completions that are sampled: set method to grpo, or leave it empty",
        ),
        (
            c.teaches and bool(a.kl_coef),
            (
                "algorithm.teacher stands in the reference's place and algorithm.kl_coef is"
                f" {a.kl_coef}, which needs a reference of its own: set algorithm.kl_coef to 0"
            ),
        ),
        (
            c.teaches and a.surrogate == "gmpo",
            (
                "algorithm.surrogate gmpo has one advantage per sequence and algorithm.teacher gives each"
                " token its own: use ppo, gspo or cispo"
            ),
        ),
        (
            c.teaches and a.refill_rounds > 0 and not graded,
            (
                "algorithm.refill_rounds replaces groups of equal rewards, and with both weights of the"
                " grader at 0 no reward teaches: set algorithm.refill_rounds to 0"
            ),
        ),
        (
            c.teaches and bool(c.evaluation.pass_rate_samples),
            "evaluation.pass_rate_samples learns from nothing, so it has no use for algorithm.teacher: leave"
            " algorithm.teacher empty",
        ),
    ]


def _refused_replay(c: RunConfig) -> list[tuple[bool, str]]:
    """Runs in which the engine's choices of experts cannot be replayed, and what to change."""
    replays, key = c.algorithm.routing_replay, "algorithm.routing_replay"
    return [
        (
            replays and c.method != "grpo",
            f"{key} replays what an engine chose, and method {c.method} has none: set {key} to false",
        ),
        (
            replays and c.placement.device == "cuda" and not c.rollout.prefix_caching,
            f"{key} needs rollout.prefix_caching, with which vLLM keeps its choices: set it to true",
        ),
        (
            replays and c.placement.device == "cuda" and c.rollout.tensor_parallel > 1,
            (
                f"{key} with rollout.tensor_parallel {c.rollout.tensor_parallel}: of an engine's GPUs vLLM"
                " keeps the choices on the first alone, and the others would end; set"
                f" rollout.tensor_parallel to 1, or {key} to false"
            ),
        ),
    ]


def _refused_adapters(c: RunConfig) -> list[tuple[bool, str]]:
    """Adapters that would be trained or merged wrongly, and what to change."""
    return [
        (
            c.lora.qlora and c.method == "grpo",
            (
                "lora.qlora is for method sft: the engine holds all weights in its own type, with other"
                " kernels: set it to false. 72B with adapters on bf16 takes 18 GiB of states per GPU on 8"
            ),
        ),
        (
            c.lora.qlora and not c.model.gradient_checkpointing,
            (
                "lora.qlora keeps every weight that it gathers until the backward pass unless layers are"
                " recomputed: set model.gradient_checkpointing to true"
            ),
        ),
        (
            bool(c.lora.dropout) and c.method == "grpo",
            (
                f"lora.dropout is {c.lora.dropout} with method grpo: the engine samples without it, so its"
                " logprobs would not be the policy's; set it to 0"
            ),
        ),
        (
            not c.lora.rank and (c.lora.vision or bool(c.lora.dropout) or c.lora.qlora),
            (
                "lora.rank is 0, so there is no adapter for lora.vision, lora.dropout, lora.qlora: set"
                " lora.rank to 16"
            ),
        ),
        (
            bool(c.lora.rank) and c.lora.vision and c.model.freeze_vision,
            (
                "lora.vision trains adapters in the vision tower and model.freeze_vision freezes it: set one"
                " to false"
            ),
        ),
    ]


def _refused(a: Algorithm) -> list[tuple[bool, str]]:
    """Combinations of the objective's options that mean nothing, and what to change."""
    of_sequences, reward_kl = a.of_sequences, bool(a.kl_coef) and a.kl_in == "reward"
    corrects = a.rollout_correction != "off"
    return [
        (
            of_sequences and corrects and a.corrected_at == "token",
            (
                f"algorithm.surrogate {a.surrogate} has one ratio per sequence and"
                " algorithm.correction_level is token, which weighs its tokens unequally: use geometric or"
                " sequence, or leave it empty"
            ),
        ),
        (
            not corrects and (bool(a.correction_level) or a.correction_low > 0 or a.correction_high != 2.0),
            (
                "algorithm.rollout_correction is off, so algorithm.correction_level, correction_low and"
                " correction_high do nothing: leave them out, or set it to truncate or mask"
            ),
        ),
        (
            reward_kl and a.kl_estimated_by != "k1",
            (
                f"algorithm.kl_estimator {a.kl_estimator} in the reward has a gradient that is not the KL's"
                " (its score function weighs k2 and k3 themselves): use k1, or leave it empty, or set"
                " algorithm.kl_in to loss"
            ),
        ),
        (
            a.overlong_buffer > 0 and a.overlong_penalty == 0,
            "algorithm.overlong_buffer is set and algorithm.overlong_penalty is 0, so nothing is lost: set"
            " the buffer to 0, or the penalty above 0",
        ),
        (
            a.overlong_buffer == 0 and a.overlong_penalty != 1,
            f"algorithm.overlong_penalty is {a.overlong_penalty:g} and algorithm.overlong_buffer 0, where"
            " nothing is too long: set the buffer (0.2 in DAPO), or leave the penalty out",
        ),
        (
            of_sequences and a.loss_denominator != "sequences",
            (
                f"algorithm.surrogate {a.surrogate} is an objective of sequences and"
                f" algorithm.loss_denominator is {a.loss_denominator}: use sequences"
            ),
        ),
        (
            bool(a.kl_coef) and a.kl_in == "loss" and a.kl_estimated_by == "k1",
            (
                "algorithm.kl_estimator k1 in the loss has a gradient of mean zero: use k2 or k3, or set "
                "algorithm.kl_in to reward"
            ),
        ),
        (
            bool(a.kl_target) and not a.kl_coef,
            (
                "algorithm.kl_target is set and algorithm.kl_coef is 0, so there is no reference: give"
                " kl_coef its first value, such as 1e-3"
            ),
        ),
        (
            bool(a.dual_clip) and a.surrogate not in ("ppo", "gspo"),
            f"algorithm.dual_clip does nothing to algorithm.surrogate {a.surrogate}: set it to 0",
        ),
        (
            bool(a.dual_clip) and a.dual_clip <= 1,
            f"algorithm.dual_clip is {a.dual_clip}: it must be above 1 (3 in the paper), or 0 for none",
        ),
        (
            a.surrogate == "gmpo" and (a.gamma < 1 or (a.advantage.startswith("reinforce_pp") and reward_kl)),
            (
                "algorithm.surrogate gmpo has one advantage per sequence: use algorithm.gamma 1, and another "
                "algorithm.advantage or algorithm.kl_in loss"
            ),
        ),
        (
            a.advantage == "gdpo" and (a.normalize_reward or reward_kl),
            (
                "algorithm.advantage gdpo normalizes each reward by itself: set algorithm.normalize_reward to"
                " false and algorithm.kl_in to loss"
            ),
        ),
    ]


def _refused_ahead(c: RunConfig) -> list[tuple[bool, str]]:
    """What a run that samples ahead of learning cannot do, and what to change."""
    ahead, carries = c.rollout.staleness > 0, c.carries_over
    return [
        (
            carries and not ahead,
            (
                f"rollout.tokens_per_step is {c.rollout.tokens_per_step} with rollout.staleness 0: a step"
                " that is trained right after it is sampled has no later phase to go on in; set"
                " rollout.staleness to 1 or more"
            ),
        ),
        (
            carries and c.fleet.workers != "off",
            (
                f"rollout.tokens_per_step is {c.rollout.tokens_per_step} with fleet.workers"
                f" {c.fleet.workers}: workers sample beside the learner and hold no step up, and what they"
                " send is of one version; set one of them to 0 or off"
            ),
        ),
        (
            carries and c.algorithm.routing_replay,
            (
                f"rollout.tokens_per_step is {c.rollout.tokens_per_step} with algorithm.routing_replay: the"
                " engine chooses experts anew for the tokens that older weights sampled; set one of them to 0"
                " or false"
            ),
        ),
        (
            ahead and c.algorithm.rollout_correction == "off",
            (
                f"rollout.staleness is {c.rollout.staleness} with algorithm.rollout_correction off: older"
                " weights sampled what is learned, and nothing would correct for it; set it to truncate"
            ),
        ),
        (
            ahead and c.algorithm.refill_rounds > 0,
            (
                f"rollout.staleness is {c.rollout.staleness} with algorithm.refill_rounds"
                f" {c.algorithm.refill_rounds}: which prompts come next would depend on rewards that are not"
                " known yet; set one of them to 0"
            ),
        ),
        (
            ahead and c.evaluation.pass_rate_samples > 0,
            (
                f"rollout.staleness is {c.rollout.staleness} with evaluation.pass_rate_samples"
                f" {c.evaluation.pass_rate_samples}: pass rates are of one version of the weights, and"
                " nothing is learned from them; set rollout.staleness to 0"
            ),
        ),
    ]


def validate_saving(config: RunConfig) -> None:
    """Refuses a run that could not resume: every node writes its own part, and a new node has none of
    them."""
    remote = config.checkpoint.remote
    if is_address(remote):  # ${BUCKET} of a recipe is filled in where it runs
        BucketAddress.parse(remote, "checkpoint.remote")
    if config.placement.nodes > 1 and not remote and not config.checkpoint.shared_files:
        raise ConfigError(
            f"placement.nodes is {config.placement.nodes} and checkpoint.remote is empty, so no new node"
            " could resume: set it to a bucket, or checkpoint.shared_files to true where all nodes see"
            " run.dir"
        )
