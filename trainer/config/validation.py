"""What can be checked of a configuration without touching disk or devices: tables of refusals."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

from trainer.config.bucket_address import BucketAddress, is_address
from trainer.config.expected import check_bands
from trainer.config.overrides import ConfigError
from trainer.config.ranges import check_ranges
from trainer.config.rewards import Rewards
from trainer.config.schema import RunConfig
from trainer.config.turns import BUILT_IN
from trainer.config.watching import GUARDS

JUDGED = ("text", "math", "number", "letter")
HARMLESS = ("api-version", "version", "model")
"""Parameters that an address may have: everything else may be a secret."""
Refusals = dict[str, object]
"""What is wrong and what to change -> whether it is so. The first that is so is raised."""


def validate(config: RunConfig) -> None:
    """Raises ConfigError, with the change to make, if the configuration cannot run."""
    check_ranges(config)
    check_bands(config.expected)
    _refuse(_of_run(config) | _of_adapters(config) | _of_fleet(config) | _of_teacher(config))
    _refuse(_of_turns(config))
    check_rewards(config.rewards)
    for name in config.guards.ending:
        if name not in GUARDS:
            raise ConfigError(f"guards.end: {name!r} is no guard; {nearest_name(name, GUARDS)}")
    if config.method == "sft":
        _refuse(_of_sft(config))
    else:
        _refuse(_of_evaluation(config) | _of_sampling(config) | _of_objective(config) | _of_staleness(config))


def _refuse(refusals: Refusals) -> None:
    for change, wrong in refusals.items():
        if wrong:
            raise ConfigError(change)


def _of_run(c: RunConfig) -> Refusals:
    """Model, data, and how the optimizer is sharded."""
    o, ranks = c.optimizer, c.placement.workers_per_node
    rows = "sft.batch_size" if c.method == "sft" else "rollout.prompts_per_step"
    return {
        f"model.min_pixels {c.model.min_pixels} > model.max_pixels {c.model.max_pixels}: swap them": (
            c.model.min_pixels > c.model.max_pixels
        ),
        "data.source is prepared by a recipe (`python3 launch.py up RECIPE --set data.source=...`): without"
        f" one, run `python3 launch.py data prepare {c.data.source}`, and set data.path to what it made": (
            c.data.source and not c.data.path
        ),
        f"data.max_samples {c.data.max_samples} is less than the {c.rows_per_step} rows of one step: raise"
        f" it, or lower {rows}": 0 < c.data.max_samples < c.rows_per_step,
        f"optimizer.hpz_ranks {o.hpz_ranks} does not divide the {ranks} ranks of a node: use a divisor of"
        f" {ranks}": ranks % o.hpz_ranks,
        f"optimizer.zero_stage is {o.zero_stage} with method grpo: reference, offload and weight sync go by"
        " ZeRO-3's shards; set it to 3": o.zero_stage < 3 and c.method == "grpo",
        f"optimizer.hpz_ranks is {o.hpz_ranks} at optimizer.zero_stage {o.zero_stage}, where every GPU has"
        " all weights: set it to 1": o.zero_stage < 3 and o.hpz_ranks > 1,
        "optimizer.warmup_steps and optimizer.warmup_ratio are both set: set one to 0": (
            o.warmup_steps and o.warmup_ratio
        ),
    }


def _of_sft(c: RunConfig) -> Refusals:
    """Supervised fine-tuning."""
    world = c.placement.world_size
    return {
        "evaluation.pass_rate_samples needs the engine: set method to grpo": c.evaluation.pass_rate_samples,
        f"sft.batch_size {c.sft.batch_size} leaves some of the {world} ranks without a row in every step: use"
        f" at least {world}": c.sft.batch_size < world,
    }


def _of_evaluation(c: RunConfig) -> Refusals:
    """Held-out questions, benchmarks and pass rates."""
    e = c.evaluation
    greedy = e.temperature == 0
    return {
        f"evaluation.temperature is {e.temperature}, and vLLM has none between 0 (greedy) and 0.01": (
            0 < e.temperature < 0.01
        ),
        f"evaluation.top_p is {e.top_p} at evaluation.temperature 0, which takes the likeliest token: set"
        " evaluation.top_p to 1, or a temperature above 0": greedy and e.top_p < 1,
        f"evaluation.samples_per_prompt is {e.samples_per_prompt} at evaluation.temperature 0: greedy"
        " completions of a prompt are all the same; use 1, or a temperature above 0": (
            greedy and e.samples_per_prompt > 1
        ),
        "evaluation.benchmarks is set and evaluation.pass_rate_samples 0: benchmarks are asked by a run that"
        " trains nothing; set evaluation.pass_rate_samples to 1 or more": (
            e.benchmarks and not e.pass_rate_samples
        ),
        "several greedy completions of a prompt are all the same: use one, or a temperature above 0": (
            e.benchmarks and greedy and e.pass_rate_samples > 1
        ),
    }


def _of_sampling(c: RunConfig) -> Refusals:
    """Groups, engines and updates. With `fleet.workers=only` the ranks have no engine, and a worker's has the
    ranks that it needs."""
    r, world = c.rollout, c.placement.world_size
    engines = max(1, world // r.tensor_parallel)
    step, update = c.samples_per_step, c.samples_per_update
    has_engines = c.fleet.workers != "only"
    return {
        "rollout.samples_per_prompt is 1: a group of one has no advantage; use at least 2": (
            r.samples_per_prompt < 2 and not c.teaches and not c.evaluation.pass_rate_samples
        ),
        f"rollout.tensor_parallel {r.tensor_parallel} does not divide the {world} ranks: use a divisor of"
        f" {world}": has_engines and world % r.tensor_parallel,
        "rollout.expert_parallel deals experts to the GPUs of an engine, and rollout.tensor_parallel is 1:"
        " set it to the GPUs of an engine, or rollout.expert_parallel to false": (
            has_engines and r.expert_parallel and r.tensor_parallel == 1
        ),
        f"rollout.prompts_per_step {r.prompts_per_step} does not divide by the {engines} engines: use a"
        f" multiple of {engines}": has_engines and r.prompts_per_step % engines,
        f"algorithm.samples_per_update {update} does not divide the {step} samples of a step"
        f" (prompts_per_step x samples_per_prompt): use a divisor of {step}": step % update,
    }


def _of_fleet(c: RunConfig) -> Refusals:
    """Rollout workers."""
    own, parallel = c.fleet.gpus_per_node, c.rollout.tensor_parallel
    off = c.fleet.workers == "off"
    return {
        f"fleet.gpus_per_node is {own} and fleet.workers off, so they would wait for nothing: set"
        " fleet.workers to only, or fleet.gpus_per_node to 0": off and own,
        f"an engine of rollout.tensor_parallel {parallel} does not divide the {own} GPUs of a node that"
        f" sample: set fleet.gpus_per_node to a multiple of {parallel}": not off and own % parallel,
        "fleet.workers is for method grpo, which samples: set it to off": not off and c.method != "grpo",
        "fleet.workers needs a bucket, through which trainer and workers speak: set checkpoint.remote to one"
        " that both reach": not off and not c.checkpoint.remote,
    }


def _of_teacher(c: RunConfig) -> Refusals:
    """What earns completions something: a teacher, or rewards."""
    a, r = c.algorithm, c.rewards
    graded = r.accuracy_weight or r.format_weight
    learns = c.method == "grpo" and not c.evaluation.pass_rate_samples
    return {
        "every weight of the rewards is 0 and there is no algorithm.teacher, so all completions earn the"
        " same: set rewards.accuracy_weight or another weight": learns
        and not (graded or a.overlong_buffer or c.teaches),
        f"algorithm.teacher_coef is {a.teacher_coef:g} and algorithm.teacher is empty: name the teacher": (
            not a.teacher and a.teacher_coef != 1
        ),
        "algorithm.teacher_revision is set and algorithm.teacher is empty: name the teacher too": (
            a.teacher_revision and not a.teacher
        ),
        "algorithm.teacher judges completions that are sampled: set method to grpo, or leave it empty": (
            a.teacher and c.method != "grpo"
        ),
        f"algorithm.teacher stands in the reference's place and algorithm.kl_coef is {a.kl_coef}, which"
        " needs a reference of its own: set algorithm.kl_coef to 0": c.teaches and a.kl_coef,
        "algorithm.surrogate gmpo has one advantage per sequence and algorithm.teacher gives each token its"
        " own: use ppo, gspo or cispo": c.teaches and a.surrogate == "gmpo",
        "algorithm.refill_rounds replaces groups of equal rewards, and with both weights of the grader at 0"
        " no reward teaches: set algorithm.refill_rounds to 0": c.teaches and a.refill_rounds and not graded,
        "evaluation.pass_rate_samples learns from nothing, so it has no use for algorithm.teacher: leave"
        " algorithm.teacher empty": c.teaches and c.evaluation.pass_rate_samples,
    }


def _of_adapters(c: RunConfig) -> Refusals:
    """Adapters that would be trained or merged wrongly."""
    lora, sampled = c.lora, c.method == "grpo"
    return {
        "lora.qlora is for method sft: the engine holds all weights in its own type, with other kernels: set"
        " it to false. 72B with adapters on bf16 takes 18 GiB of states per GPU on 8": lora.qlora and sampled,
        "lora.qlora keeps every weight that it gathers until the backward pass unless layers are recomputed:"
        " set model.gradient_checkpointing to true": lora.qlora and not c.model.gradient_checkpointing,
        f"lora.dropout is {lora.dropout} with method grpo: the engine samples without it, so its logprobs"
        " would not be the policy's; set it to 0": lora.dropout and sampled,
        "lora.rank is 0, so lora.vision, lora.dropout and lora.qlora have no adapter: set lora.rank to 16": (
            not lora.rank and (lora.vision or lora.dropout or lora.qlora)
        ),
        "lora.vision trains adapters of a tower that model.freeze_vision freezes: set one to false": (
            lora.rank and lora.vision and c.model.freeze_vision
        ),
    }


def _of_objective(c: RunConfig) -> Refusals:
    """Combinations of the objective's options that mean nothing."""
    a = c.algorithm
    reward_kl, corrects = c.kl_in_reward, a.rollout_correction != "off"
    penalizes = a.advantage.startswith("reinforce_pp") and reward_kl
    return {
        f"algorithm.surrogate {a.surrogate} has one ratio per sequence and algorithm.correction_level is"
        " token, which weighs its tokens unequally: use geometric or sequence, or leave it empty": (
            a.of_sequences and corrects and a.corrected_at == "token"
        ),
        "algorithm.rollout_correction is off, so algorithm.correction_level, correction_low and"
        " correction_high do nothing: leave them out, or set it to truncate or mask": (
            not corrects and (a.correction_level or a.correction_low > 0 or a.correction_high != 2.0)
        ),
        f"algorithm.kl_estimator {a.kl_estimator} in the reward has a gradient that is not the KL's (its"
        " score function weighs k2 and k3 themselves): use k1, or leave it empty, or kl_in loss": (
            reward_kl and a.kl_estimated_by != "k1"
        ),
        "algorithm.overlong_buffer is set and algorithm.overlong_penalty is 0, so nothing is lost: set the"
        " buffer to 0, or the penalty above 0": a.overlong_buffer and not a.overlong_penalty,
        f"algorithm.overlong_penalty is {a.overlong_penalty:g} and algorithm.overlong_buffer 0, where"
        " nothing is too long: set the buffer (0.2 in DAPO), or leave the penalty out": (
            not a.overlong_buffer and a.overlong_penalty != 1
        ),
        f"algorithm.surrogate {a.surrogate} is an objective of sequences and algorithm.loss_denominator is"
        f" {a.loss_denominator}: use sequences": a.of_sequences and a.loss_denominator != "sequences",
        "algorithm.kl_estimator k1 in the loss has a gradient of mean zero: use k2 or k3, or set"
        " algorithm.kl_in to reward": a.kl_coef and a.kl_in == "loss" and a.kl_estimated_by == "k1",
        "algorithm.kl_target is set and algorithm.kl_coef is 0, so there is no reference: give kl_coef its"
        " first value, such as 1e-3": a.kl_target and not a.kl_coef,
        f"algorithm.dual_clip does nothing to algorithm.surrogate {a.surrogate}: set it to 0": (
            a.dual_clip and a.surrogate not in ("ppo", "gspo")
        ),
        f"algorithm.dual_clip is {a.dual_clip}: it must be above 1 (3 in the paper), or 0 for none": (
            a.dual_clip and a.dual_clip <= 1
        ),
        "algorithm.surrogate gmpo has one advantage per sequence: use algorithm.gamma 1, and another"
        " algorithm.advantage or algorithm.kl_in loss": a.surrogate == "gmpo" and (a.gamma < 1 or penalizes),
        "algorithm.advantage gdpo normalizes each reward by itself: set algorithm.normalize_reward to false"
        " and algorithm.kl_in to loss": a.advantage == "gdpo" and (a.normalize_reward or reward_kl),
    }


def _of_staleness(c: RunConfig) -> Refusals:
    """A run that samples ahead of learning, or carries completions over."""
    ahead, carries = c.rollout.staleness, c.carries_over
    samples = c.evaluation.pass_rate_samples
    carried = f"rollout.tokens_per_step is {c.rollout.tokens_per_step}"
    behind = f"rollout.staleness is {ahead}"
    return {
        f"{carried} with rollout.staleness 0: a step that is trained right after it is sampled has no later"
        " phase to go on in; set rollout.staleness to 1 or more": carries and not ahead,
        f"{carried} with fleet.workers {c.fleet.workers}: workers sample beside the learner and hold no step"
        " up, and what they send is of one version; set one of them to 0 or off": (
            carries and c.fleet.workers != "off"
        ),
        f"{behind} with algorithm.rollout_correction off: older weights sampled what is learned, and nothing"
        " would correct for it; set it to truncate": ahead and c.algorithm.rollout_correction == "off",
        f"{behind} with algorithm.refill_rounds {c.algorithm.refill_rounds}: which prompts come next would"
        " depend on rewards that are not known yet; set one of them to 0": ahead
        and c.algorithm.refill_rounds,
        f"{behind} with evaluation.pass_rate_samples {samples}: pass rates are of one version of the"
        " weights, and nothing is learned from them; set rollout.staleness to 0": ahead and samples,
    }


def _of_turns(c: RunConfig) -> Refusals:
    """Episodes of several turns."""
    environment = c.turns.environment
    key, unset = f"turns.environment is {environment}", "set turns.environment to off"
    python: Refusals = {
        f"turns.python runs an environment of your own, and {key}: leave turns.python empty": (
            c.turns.python and not c.turns.own
        ),
    }
    if environment == "off":
        return python
    least, most = c.model.min_pixels, c.model.max_pixels
    path, _, name = environment.rpartition(":")
    named_file = path.endswith(".py") and name.isidentifier()
    return python | {
        f"turns.environment is {environment!r}: {nearest_name(environment, BUILT_IN)}, or write"
        " path/to/file.py:NAME (a second try, a calculator and Python are among the examples)": (
            c.turns.own and not named_file
        ),
        f"{key} with method {c.method}, which samples no reply: {unset}": c.method != "grpo",
        f"{key} with fleet.workers {c.fleet.workers}: workers sample one turn alone; set fleet.workers to"
        f" off, or {unset}": c.fleet.workers != "off",
        f"{key} with algorithm.teacher, which was not tried together: leave algorithm.teacher empty, or"
        f" {unset}": c.teaches,
        f"turns.image_pixels {c.turns.image_pixels} is not between model.min_pixels {least} and"
        f" model.max_pixels {most}, so pictures would be resized once more: choose one that is": (
            environment == "zoom" and not least <= c.turns.image_pixels <= most
        ),
    }


def check_rewards(rewards: Rewards) -> None:
    """Raises ConfigError, with the change to make, for what of the `rewards` section is wrong."""
    graders = ("function", "functions", "remote_url", "judge_url")
    both = [name for name in graders if getattr(rewards, name)]
    types = [name.strip() for name in rewards.judge_types.split(",")]
    refusals: Refusals = {
        f"rewards.{' and rewards.'.join(both[:2])} are both set: unset one (a server has its own judge)": (
            len(both) > 1
        ),
    }
    for name in types:
        refusals[f"rewards.judge_types: {name!r} is none of {', '.join(JUDGED)}"] = name not in JUDGED
    refusals |= {
        "rewards.judge_url is set and rewards.judge_model is empty: name the model it serves": (
            rewards.judge_url and not rewards.judge_model
        ),
        "rewards.judge_model is set and rewards.judge_url is empty, so no judge is asked: set"
        " rewards.judge_url": rewards.judge_model and not rewards.judge_url,
    }
    refusals |= _of_address("remote_url", rewards.remote_url, "SPOTRL_REWARD_TOKEN")
    refusals |= _of_address("judge_url", rewards.judge_url, "SPOTRL_JUDGE_KEY")
    metrics = [function.metric for function in rewards.functions]
    for number, function in enumerate(rewards.functions):
        key, metric = f"rewards.functions[{number}]", function.metric
        refusals |= {
            f"{key}.path is {function.path!r}: write path/to/file.py:function": ":" not in function.path,
            f"{key}.name is {metric!r}: use letters, digits and _": not metric.isidentifier(),
            f"two of rewards.functions have the metric reward/function_{metric}: give one a name": (
                metric in metrics[:number]
            ),
            f"{key}.weight is {function.weight}: use a finite number": not abs(function.weight) < 1e30,
        }
    _refuse(refusals)


def _of_address(key: str, url: str, variable: str) -> Refusals:
    """The address of a server, which stands in the run's configuration, its report and its logs."""
    if not url:
        return {}
    parts = urlsplit(url)
    unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in HARMLESS]
    what = f"the parameter {unknown[0]!r}" if unknown else "a password" if "@" in parts.netloc else "a #"
    return {
        f"rewards.{key}: write http://HOST:PORT/... or https://...": (
            parts.scheme not in ("http", "https") or not parts.hostname
        ),
        f"rewards.{key} has {what}, and addresses stand in config.yaml, reports and logs: leave it out,"
        f" and put a token into {variable}, which is sent as a header": (
            "@" in parts.netloc or unknown or parts.fragment
        ),
    }


def nearest_name(name: str, known: Sequence[str]) -> str:
    """What a person may have meant, for a message."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


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
