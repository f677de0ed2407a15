"""The fixed table of metric names: what each is, and its unit. docs/metrics.md is this table, held to it by a
test.

Names starting with `time/`, `perf/` or `fleet/` may differ between equal runs; all others are the same to the
last bit.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    unit: str
    meaning: str


NAMES: dict[str, Name] = {
    # --- what the policy earns
    "reward/mean": Name("reward", "Mean reward of the step's completions, before any normalization."),
    "reward/std": Name("reward", "Standard deviation of the same, over all completions of the step."),
    "reward/largest": Name("reward", "Largest size of a reward, whatever its sign."),
    "reward/accuracy": Name(
        "fraction", "Mean accuracy reward: with the built-in grader, the share of correct completions."
    ),
    "reward/format": Name("fraction", "Share of completions in the form of `rewards.answer`."),
    "reward/correct_rate": Name("fraction", "Share of completions that the grader found correct."),
    "reward/wrong_rate": Name("fraction", "Share of completions that it found wrong."),
    "reward/no_answer_rate": Name("fraction", "Share of completions in which it found no final answer."),
    "reward/timeout_rate": Name(
        "fraction",
        "Share of completions that were not graded in time, by the grader's deadline or the judge's.",
    ),
    "reward/error_rate": Name(
        "fraction", "Share of completions that could not be graded: an error of what grades them."
    ),
    "reward/algebra_fraction": Name(
        "fraction", "Share of completions whose expressions had to be evaluated, the slow path."
    ),
    "reward/decided_exact": Name(
        "fraction", "Share of completions that exact arithmetic decided (docs/rewards.md)."
    ),
    "reward/decided_points": Name("fraction", "Share of completions that values at points decided."),
    "reward/decided_text": Name(
        "fraction", "Share of completions that the form of the texts decided: letters, words, dates."
    ),
    "group/zero_std_fraction": Name(
        "fraction", "Share of prompts whose completions all earned the same: they teach nothing."
    ),
    "reward/overlong": Name(
        "reward", "Mean of the overlong penalty, 0 to -1, before its weight (`algorithm.overlong_buffer`)."
    ),
    "reward/tags": Name(
        "fraction",
        "Mean share of the four think and answer tags that stand exactly once (`rewards.tags_weight`).",
    ),
    "reward/length": Name(
        "reward", "Mean of brevity within the group, 0.5 to -0.5 (`rewards.length_weight`)."
    ),
    "reward/repetition": Name(
        "reward", "Mean of the repetition penalty, 0 to -1 (`rewards.repetition_weight`)."
    ),
    "reward/judged_fraction": Name(
        "fraction", "Share of completions that the judge decided (`rewards.judge_url`)."
    ),
    "group/sampled": Name("prompts", "Prompts asked in the step, over all rounds of dynamic sampling."),
    "group/surplus": Name(
        "prompts", "Those of them whose completions earned unequal rewards and were not trained on."
    ),
    "group/trained_zero_std": Name(
        "prompts", "Groups of equal reward trained on: no round was left to replace them."
    ),
    "data/level": Name(
        "level", "Difficulty of the rows that are drawn before this step's update (`data.curriculum`)."
    ),
    # --- the update
    "loss/total": Name("loss", "What was minimised: policy + kl_coef * KL. Mean over the step's updates."),
    "loss/nll": Name(
        "nats/token", "Mean negative log-probability of the completion tokens under the policy."
    ),
    "loss/token_accuracy": Name(
        "fraction", "Share of completion tokens that are the policy's most probable ones."
    ),
    "loss/policy": Name(
        "loss", "The surrogate. With PPO's, near 0 by construction where each step is one update."
    ),
    "kl/mean": Name(
        "nats/token",
        "The estimate of the KL from policy to reference, before kl_coef; absent without a reference.",
    ),
    "kl/coef": Name(
        "", "`algorithm.kl_coef` as steered towards `algorithm.kl_target`; absent where it is fixed."
    ),
    "teacher/kl": Name(
        "nats/token",
        "KL from policy to teacher, estimated on the policy's own completions: log p - log p_teacher.",
    ),
    "teacher/gap_max": Name(
        "nats", "Largest difference of the two log-probabilities of a token, in either direction."
    ),
    "teacher/likelier_fraction": Name(
        "fraction",
        "Share of tokens that the teacher finds likelier than the policy did; the rest is pushed down.",
    ),
    "entropy/mean": Name(
        "nats/token", "Entropy of the policy's next-token distribution; its collapse ends learning."
    ),
    "ratio/mean": Name(
        "ratio", "Mean probability ratio of policy to the policy that the update started from."
    ),
    "ratio/clip_fraction": Name("fraction", "Share of tokens whose surrogate was clipped."),
    "ratio/clamped_fraction": Name(
        "fraction", "Share of tokens more than 20 nats away, where the ratio is clamped and k3 is a line."
    ),
    "grad/norm": Name("norm", "Global gradient norm before clipping; mean over the step's updates."),
    "optim/lr": Name("", "Learning rate; mean over the step's updates."),
    "grad/zero_parameters": Name(
        "count",
        "Parameters that should learn and whose gradient was exactly 0 in the run's first update; absent if "
        "none.",
    ),
    "optim/skipped_updates": Name(
        "count", "Updates of the step left out because their gradient was not finite."
    ),
    "optim/empty_updates": Name(
        "count", "Updates of the step that were not made: no completion was left to learn from."
    ),
    # --- engine against policy
    "mismatch/logprob_abs_mean": Name(
        "nats", "Mean absolute log-prob difference of engine and policy over the sampled tokens."
    ),
    "mismatch/logprob_abs_max": Name("nats", "Largest of the same."),
    "mismatch/kl": Name("nats/token", "KL from engine to policy on the sampled tokens, k3 estimator."),
    "mismatch/kl_reverse": Name("nats/token", "KL from policy to engine on the same tokens."),
    "mismatch/ratio_mean": Name(
        "ratio", "Mean ratio of policy to engine probability over them; 1 in expectation."
    ),
    "mismatch/ratio_max": Name("ratio", "Largest of the same."),
    "mismatch/ess": Name(
        "fraction", "Effective sample size by these ratios, mean^2 / mean square, as a share of the tokens."
    ),
    "mismatch/corrected_fraction": Name(
        "fraction", "Share of tokens whose correction was truncated or masked."
    ),
    "mismatch/rerouted_fraction": Name(
        "fraction",
        "Share of tokens, over all layers, for which the policy would have chosen other experts than the"
        " engine; with `algorithm.routing_replay`.",
    ),
    "rollout/not_finite": Name(
        "completions", "Completions with engine logprobs that are not finite; the loss leaves them out."
    ),
    "rollout/staleness_mean": Name(
        "steps",
        "Versions that the sampling weights are older by; with `rollout.staleness`.",
    ),
    "rollout/staleness_max": Name("steps", "Largest of the same."),
    "staleness/logprob_abs_mean": Name(
        "nats", "With `rollout.staleness`: as `mismatch/logprob_abs_mean`, with older weights in the engine."
    ),
    "staleness/logprob_abs_max": Name("nats", "Largest of the same."),
    "staleness/kl": Name(
        "nats/token",
        "KL from the engine with older weights to the policy on the sampled tokens, k3 estimator.",
    ),
    "staleness/kl_reverse": Name(
        "nats/token", "KL from the policy to the engine with older weights on the same tokens."
    ),
    "staleness/ratio_mean": Name(
        "ratio", "Mean ratio of policy to engine probability over them; 1 in expectation."
    ),
    "staleness/ratio_max": Name("ratio", "Largest of the same."),
    "staleness/ess": Name(
        "fraction", "Effective sample size by these ratios, mean^2 / mean square, as a share of the tokens."
    ),
    "staleness/corrected_fraction": Name(
        "fraction", "Share of tokens whose correction was truncated or masked."
    ),
    "staleness/rerouted_fraction": Name(
        "fraction",
        "With `rollout.staleness`: as `mismatch/rerouted_fraction`, with older weights in the engine.",
    ),
    "rollout/carried_fraction": Name(
        "fraction",
        "Share of the step's completions that more than one version sampled; with `rollout.tokens_per_step`.",
    ),
    # --- the completions
    "tokens/prompt_mean": Name("tokens", "Mean prompt length, image tokens included."),
    "tokens/prompt_max": Name("tokens", "Longest prompt."),
    "tokens/response_mean": Name("tokens", "Mean completion length."),
    "tokens/response_min": Name("tokens", "Shortest completion."),
    "tokens/response_max": Name("tokens", "Longest completion."),
    "tokens/truncated_fraction": Name("fraction", "Share of completions cut at `rollout.max_tokens`."),
    "tokens/masked_fraction": Name(
        "fraction",
        "Share of completions left out of the loss because they were cut (`algorithm.mask_truncated`).",
    ),
    "tokens/too_old_fraction": Name(
        "fraction",
        "Share of learned tokens left out of the loss because of their age (`algorithm.max_token_age`).",
    ),
    "tokens/step": Name("tokens", "Prompt and completion tokens of the step, over all ranks."),
    # --- the data
    "data/left_out": Name(
        "rows", "Rows of the split left out: too long, or without a solution where one is needed."
    ),
    # --- held out
    "eval/accuracy": Name("fraction", "Share of correct completions on the held-out split."),
    "eval/format": Name("fraction", "Share of well-formed completions on it."),
    "eval/too_long": Name(
        "rows", "Prompts on it that are too long for the engine: not asked, counted as wrong."
    ),
    "eval/response_tokens_mean": Name("tokens", "Mean completion length on it."),
    "eval/truncated_fraction": Name("fraction", "Share of completions on it cut at their longest."),
    "eval/loss": Name("nats/token", "Mean cross-entropy of the solutions on the held-out split; method sft."),
    "eval/left_out": Name("rows", "Rows of it left out: too long, or without a solution; method sft."),
    # --- supervised fine-tuning
    "sft/loss": Name("nats/token", "Mean cross-entropy of the completion tokens."),
    # --- time
    "time/step_s": Name("s", "The whole step, from the end of the one before it."),
    "time/rollout_s": Name("s", "Generating completions."),
    "time/grade_s": Name("s", "Grading them, and the advantages."),
    "time/wait_s": Name("s", "Waiting for completions that are sampled meanwhile, where sampling is a lane."),
    "time/sampling_s": Name("s", "The step's whole turn of the sampling lane, where sampling is a lane."),
    "time/update_s": Name(
        "s", "Log-probabilities, forward, backward, optimizer; moving states in before it."
    ),
    "time/sync_s": Name("s", "New weights into the engine."),
    "time/checkpoint_s": Name(
        "s", "What the save after the step before held the loop up; the writing continues beside it."
    ),
    "time/eval_s": Name("s", "Held-out evaluation."),
    "time/unix_s": Name(
        "s", "Wall clock when the line was written, seconds since 1970. Written by `Metrics` itself."
    ),
    # --- speed and memory
    "perf/rollout_tokens_per_s": Name(
        "tokens/s", "Completion tokens per second of `time/rollout_s`, all engines."
    ),
    "perf/train_tokens_per_s": Name("tokens/s", "All tokens per second of `time/update_s`, all ranks."),
    "perf/tokens_per_s_per_gpu": Name(
        "tokens/s", "All tokens per second of the whole step, per GPU of the run's own nodes."
    ),
    "perf/mfu_train": Name(
        "fraction", "FLOPs of the update / peak of the GPUs (trainer/hardware/flops.py); absent if unknown."
    ),
    "perf/hfu_train": Name(
        "fraction", "The same with the activations that gradient checkpointing computes again."
    ),
    "perf/mfu_rollout": Name("fraction", "FLOPs of generation, prefill and decode / peak of the GPUs."),
    "perf/passes": Name("count", "Forward and backward passes of a rank over the step's updates."),
    "perf/ranks_busy_fraction": Name(
        "fraction", "Share of the updates in which ranks compute, by the schedule; the rest they wait."
    ),
    "perf/gathered_gib": Name(
        "GiB", "Weights that ZeRO-3 gathered on a rank in the updates; 0 at other stages."
    ),
    "perf/disk_free_gib": Name("GiB", "Free where the run is written, on the node that has the least."),
    "perf/host_memory_fraction": Name(
        "fraction", "Share of the memory in use, on the node that uses the most."
    ),
    "perf/shm_free_gib": Name("GiB", "Free in /dev/shm, on the node that has the least."),
    "perf/network_gbit_per_s": Name(
        "Gbit/s", "Sent by a node over network and InfiniBand, mean of the nodes."
    ),
    "perf/gpu_busy_fraction": Name(
        "fraction", "GPU use, mean over the step and all GPUs; a GPU that waits is busy."
    ),
    "perf/gpu_memory_gib_max": Name("GiB", "Memory in use on the fullest GPU."),
    "perf/gpu_power_w": Name("W", "Power of a GPU, mean; one that waits in a collective draws less."),
    "perf/gpu_temperature_c_max": Name("C", "Temperature of the hottest GPU."),
    "perf/gpu_slowed_fraction": Name("fraction", "Share of readings with a slowdown by heat or power brake."),
    "perf/peak_memory_gib": Name(
        "GiB", "Largest memory of a rank: of its GPU in learning; on CPU of its process."
    ),
    "perf/fragments_gib_max": Name(
        "GiB", "Memory of the fullest GPU that lay free between tensors in learning, at most; GPUs only."
    ),
    "perf/grader_busy": Name("count", "Requests that a reward server with a full queue sent back so far."),
    "perf/grader_restarts": Name("count", "Grader processes killed and replaced so far."),
    "perf/judge_requests": Name(
        "count", "Requests sent to the judge by the run, as far as its checkpoints know."
    ),
    "perf/judge_remembered": Name(
        "count", "Answers that it had judged before, since the start of the process."
    ),
    "perf/checkpoint_save_s": Name("s", "The last save from start to commit, upload included."),
    "perf/checkpoint_stall_s": Name("s", "What it held the loop up."),
    "perf/checkpoint_gib": Name("GiB", "Its size over all ranks."),
    "perf/checkpoint_failures": Name("count", "Saves given up so far."),
    "perf/checkpoint_interval_steps": Name("steps", "Steps between saves, as chosen."),
    "perf/start_s": Name(
        "s", "Launch to ready for the first step; on the first line of every start, like its parts."
    ),
    "perf/start_launch_s": Name("s", "Of it: checks, the other nodes, Ray, the driver's own start."),
    "perf/start_place_s": Name("s", "Ranks placed, rows measured."),
    "perf/start_load_s": Name("s", "Model and engine loaded; the checkpoint's files are fetched beside it."),
    "perf/start_resume_s": Name("s", "The rest of the fetch, and the checkpoint read into the policy."),
    "perf/start_sync_s": Name("s", "The first weight sync and its check."),
    "perf/slots_used": Name(
        "fraction",
        "Share of the decode slots of the step's rollout that held an unfinished completion, if each"
        " completion had a slot until the last was done. Not with workers.",
    ),
    "perf/replayed_completions": Name(
        "count",
        "Completions taken from the rollout log in place of sampling, since the start of the process.",
    ),
    "perf/rollout_log_failures": Name(
        "count", "Steps since then whose log could not be written, sent or used."
    ),
    # --- the fleet (`fleet.workers`); counts are since the start of this process
    "fleet/wait_s": Name("s", "The trainer's wait for samples in this step: idle GPUs."),
    "fleet/publish_s": Name("s", "Finding what changed of the weights, and waiting until the last is sent."),
    "fleet/patch_mib": Name("MiB", "The newest version's changes, all ranks."),
    "fleet/workers": Name("count", "Workers that live and follow this attempt."),
    "fleet/idle_share": Name("fraction", "Share of the workers' time in this step without a unit to sample."),
    "fleet/completions_per_s": Name("1/s", "What these sample, by each one's last unit."),
    "fleet/units": Name("count", "Units whose samples were accepted."),
    "fleet/own_units": Name(
        "count", "Units that the trainer's own engines sampled (`fleet.workers=beside`)."
    ),
    "fleet/late": Name("count", "Units that a second worker sent after the first."),
    "fleet/doubled": Name("count", "Units that an idle worker was given too."),
    "fleet/again": Name("count", "Units given out anew after a loss, a refusal or a damaged object."),
    "fleet/lost": Name("count", "Workers that fell silent for `fleet.lost_s`."),
    "fleet/refused": Name("count", "Units whose samples could not be trained on; why is in the bucket."),
    "fleet/turned_away": Name(
        "count",
        "Workers told to end: for a probe that is not the policy's, or for samples refused or of no use.",
    ),
    "fleet/forged": Name(
        "count", "Objects that were not written with the run's key, or not for their place."
    ),
}

PREFIXES = {
    "staleness/age_": (
        "With `rollout.tokens_per_step`, on a group per rank: by the number of versions that a token's"
        " weights are older by, the share of such tokens, mean and largest ratio of policy to engine, and the"
        " share beyond the correction's limits."
    ),
    "reward/function_": (
        "Mean of what one of `rewards.functions` gave the completions that it applies to, before its weight."
    ),
    "eval/accuracy_": "Held-out accuracy on one source of a data set that has several.",
    "fleet/sampled_": (
        "Completions since the last line that workers on one kind of GPU sampled, or (`own`) the trainer's"
        " engines."
    ),
}
"""Names that end in what the data, or a driver, calls them."""


def unknown(names: set[str] | list[str]) -> list[str]:
    """Those of `names` that the table lacks, sorted.

    A user's reward function may add its own; the trainer may not.
    """
    return sorted(name for name in set(names) - set(NAMES) if not name.startswith(tuple(PREFIXES)))
