"""The fixed table of metric names: what each is, and its unit. docs/metrics.md is this table, held to it by a
test.

Names starting with `time/`, `perf/` or `fleet/` may differ between equal runs; all others are the same to the
last bit.
"""

from __future__ import annotations

from typing import NamedTuple


class MetricName(NamedTuple):
    unit: str
    meaning: str


NAMES: dict[str, MetricName] = {
    # --- what the policy earns
    "reward/mean": MetricName("reward", "Mean reward of the step's completions, before any normalization."),
    "reward/std": MetricName("reward", "Standard deviation of the same, over all completions of the step."),
    "reward/largest": MetricName("reward", "Largest size of a reward, whatever its sign."),
    "reward/accuracy": MetricName(
        "fraction", "Mean accuracy reward: with the built-in grader, the share of correct completions."
    ),
    "reward/format": MetricName("fraction", "Share of completions in the form of `rewards.answer`."),
    "reward/correct_rate": MetricName("fraction", "Share of completions that the grader found correct."),
    "reward/wrong_rate": MetricName("fraction", "Share of completions that it found wrong."),
    "reward/no_answer_rate": MetricName(
        "fraction", "Share of completions in which it found no final answer."
    ),
    "reward/timeout_rate": MetricName(
        "fraction",
        "Share of completions that were not graded in time, by the grader's deadline or the judge's.",
    ),
    "reward/error_rate": MetricName(
        "fraction", "Share of completions that could not be graded: an error of what grades them."
    ),
    "reward/algebra_fraction": MetricName(
        "fraction", "Share of completions whose expressions had to be evaluated, the slow path."
    ),
    "reward/decided_exact": MetricName(
        "fraction", "Share of completions that exact arithmetic decided (docs/rewards.md)."
    ),
    "reward/decided_points": MetricName("fraction", "Share of completions that values at points decided."),
    "reward/decided_text": MetricName(
        "fraction", "Share of completions that the form of the texts decided: letters, words, dates."
    ),
    "group/zero_std_fraction": MetricName(
        "fraction", "Share of prompts whose completions all earned the same: they teach nothing."
    ),
    "reward/overlong": MetricName(
        "reward", "Mean of the overlong penalty, 0 to -1, before its weight (`algorithm.overlong_buffer`)."
    ),
    "reward/tags": MetricName(
        "fraction",
        "Mean share of the four think and answer tags that stand exactly once (`rewards.tags_weight`).",
    ),
    "reward/length": MetricName(
        "reward", "Mean of brevity within the group, 0.5 to -0.5 (`rewards.length_weight`)."
    ),
    "reward/repetition": MetricName(
        "reward", "Mean of the repetition penalty, 0 to -1 (`rewards.repetition_weight`)."
    ),
    "reward/judged_fraction": MetricName(
        "fraction", "Share of completions that the judge decided (`rewards.judge_url`)."
    ),
    "group/sampled": MetricName("prompts", "Prompts asked in the step, over all rounds of dynamic sampling."),
    "group/surplus": MetricName(
        "prompts", "Those of them whose completions earned unequal rewards and were not trained on."
    ),
    "group/trained_zero_std": MetricName(
        "prompts", "Groups of equal reward trained on: no round was left to replace them."
    ),
    "data/level": MetricName(
        "level", "Difficulty of the rows that are drawn before this step's update (`data.curriculum`)."
    ),
    # --- the update
    "loss/total": MetricName(
        "loss", "What was minimised: policy + kl_coef * KL. Mean over the step's updates."
    ),
    "loss/nll": MetricName(
        "nats/token", "Mean negative log-probability of the completion tokens under the policy."
    ),
    "loss/token_accuracy": MetricName(
        "fraction", "Share of completion tokens that are the policy's most probable ones."
    ),
    "loss/policy": MetricName(
        "loss", "The surrogate. With PPO's, near 0 by construction where each step is one update."
    ),
    "kl/mean": MetricName(
        "nats/token",
        "The estimate of the KL from policy to reference, before kl_coef; absent without a reference.",
    ),
    "kl/coef": MetricName(
        "", "`algorithm.kl_coef` as steered towards `algorithm.kl_target`; absent where it is fixed."
    ),
    "teacher/kl": MetricName(
        "nats/token",
        "KL from policy to teacher, estimated on the policy's own completions: log p - log p_teacher.",
    ),
    "teacher/gap_max": MetricName(
        "nats", "Largest difference of the two log-probabilities of a token, in either direction."
    ),
    "teacher/likelier_fraction": MetricName(
        "fraction",
        "Share of tokens that the teacher finds likelier than the policy did; the rest is pushed down.",
    ),
    "entropy/mean": MetricName(
        "nats/token", "Entropy of the policy's next-token distribution; its collapse ends learning."
    ),
    "ratio/mean": MetricName(
        "ratio", "Mean probability ratio of policy to the policy that the update started from."
    ),
    "ratio/clip_fraction": MetricName("fraction", "Share of tokens whose surrogate was clipped."),
    "ratio/clamped_fraction": MetricName(
        "fraction", "Share of tokens more than 20 nats away, where the ratio is clamped and k3 is a line."
    ),
    "grad/norm": MetricName("norm", "Global gradient norm before clipping; mean over the step's updates."),
    "optim/lr": MetricName("", "Learning rate; mean over the step's updates."),
    "grad/zero_parameters": MetricName(
        "count",
        "Parameters that should learn and whose gradient was exactly 0 in the run's first update; absent if "
        "none.",
    ),
    "optim/skipped_updates": MetricName(
        "count", "Updates of the step left out because their gradient was not finite."
    ),
    "optim/empty_updates": MetricName(
        "count", "Updates of the step that were not made: no completion was left to learn from."
    ),
    # --- engine against policy
    "mismatch/logprob_abs_mean": MetricName(
        "nats", "Mean absolute log-prob difference of engine and policy over the sampled tokens."
    ),
    "mismatch/logprob_abs_max": MetricName("nats", "Largest of the same."),
    "mismatch/kl": MetricName("nats/token", "KL from engine to policy on the sampled tokens, k3 estimator."),
    "mismatch/kl_reverse": MetricName("nats/token", "KL from policy to engine on the same tokens."),
    "mismatch/ratio_mean": MetricName(
        "ratio", "Mean ratio of policy to engine probability over them; 1 in expectation."
    ),
    "mismatch/ratio_max": MetricName("ratio", "Largest of the same."),
    "mismatch/ess": MetricName(
        "fraction", "Effective sample size by these ratios, mean^2 / mean square, as a share of the tokens."
    ),
    "mismatch/corrected_fraction": MetricName(
        "fraction", "Share of tokens whose correction was truncated or masked."
    ),
    "mismatch/rerouted_fraction": MetricName(
        "fraction",
        "Share of tokens, over all layers, for which the policy would have chosen other experts than the"
        " engine; with `algorithm.routing_replay`.",
    ),
    "turns/replies_mean": MetricName(
        "replies", "Mean number of the model's replies in an episode (`turns`)."
    ),
    "turns/errors_mean": MetricName(
        "observations", "Mean number of an episode's calls that were malformed or could not be answered."
    ),
    "turns/error_fraction": MetricName(
        "fraction", "Share of observations that say what is wrong with a call."
    ),
    "turns/failed_fraction": MetricName(
        "fraction", "Share of observations whose tool hung, crashed, or gave what cannot be shown."
    ),
    "turns/limit_fraction": MetricName("fraction", "Share of episodes that `turns.limit` cut off."),
    "turns/images_fraction": MetricName("fraction", "Share of episodes that `turns.images` cut off."),
    "turns/observed_tokens_mean": MetricName(
        "tokens", "Mean number of an episode's tokens behind its prompt that the model did not sample."
    ),
    "rollout/not_finite": MetricName(
        "completions", "Completions with engine logprobs that are not finite; the loss leaves them out."
    ),
    "rollout/staleness_mean": MetricName(
        "steps",
        "Versions that the sampling weights are older by; with `rollout.staleness`.",
    ),
    "rollout/staleness_max": MetricName("steps", "Largest of the same."),
    "staleness/logprob_abs_mean": MetricName(
        "nats", "With `rollout.staleness`: as `mismatch/logprob_abs_mean`, with older weights in the engine."
    ),
    "staleness/logprob_abs_max": MetricName("nats", "Largest of the same."),
    "staleness/kl": MetricName(
        "nats/token",
        "KL from the engine with older weights to the policy on the sampled tokens, k3 estimator.",
    ),
    "staleness/kl_reverse": MetricName(
        "nats/token", "KL from the policy to the engine with older weights on the same tokens."
    ),
    "staleness/ratio_mean": MetricName(
        "ratio", "Mean ratio of policy to engine probability over them; 1 in expectation."
    ),
    "staleness/ratio_max": MetricName("ratio", "Largest of the same."),
    "staleness/ess": MetricName(
        "fraction", "Effective sample size by these ratios, mean^2 / mean square, as a share of the tokens."
    ),
    "staleness/corrected_fraction": MetricName(
        "fraction", "Share of tokens whose correction was truncated or masked."
    ),
    "staleness/rerouted_fraction": MetricName(
        "fraction",
        "With `rollout.staleness`: as `mismatch/rerouted_fraction`, with older weights in the engine.",
    ),
    "rollout/carried_fraction": MetricName(
        "fraction",
        "Share of the step's completions that more than one version sampled; with `rollout.tokens_per_step`.",
    ),
    # --- the completions
    "tokens/prompt_mean": MetricName("tokens", "Mean prompt length, image tokens included."),
    "tokens/prompt_max": MetricName("tokens", "Longest prompt."),
    "tokens/response_mean": MetricName("tokens", "Mean completion length."),
    "tokens/response_min": MetricName("tokens", "Shortest completion."),
    "tokens/response_max": MetricName("tokens", "Longest completion."),
    "tokens/truncated_fraction": MetricName("fraction", "Share of completions cut at `rollout.max_tokens`."),
    "tokens/masked_fraction": MetricName(
        "fraction",
        "Share of completions left out of the loss because they were cut (`algorithm.mask_truncated`).",
    ),
    "tokens/step": MetricName("tokens", "Prompt and completion tokens of the step, over all ranks."),
    # --- the data
    "data/left_out": MetricName(
        "rows", "Rows of the split left out: too long, or without a solution where one is needed."
    ),
    # --- held out
    "eval/accuracy": MetricName("fraction", "Share of correct completions on the held-out split."),
    "eval/format": MetricName("fraction", "Share of well-formed completions on it."),
    "eval/too_long": MetricName(
        "rows", "Prompts on it that are too long for the engine: not asked, counted as wrong."
    ),
    "eval/response_tokens_mean": MetricName("tokens", "Mean completion length on it."),
    "eval/truncated_fraction": MetricName("fraction", "Share of completions on it cut at their longest."),
    "eval/loss": MetricName(
        "nats/token", "Mean cross-entropy of the solutions on the held-out split; method sft."
    ),
    "eval/left_out": MetricName("rows", "Rows of it left out: too long, or without a solution; method sft."),
    # --- supervised fine-tuning
    "sft/loss": MetricName("nats/token", "Mean cross-entropy of the completion tokens."),
    # --- time
    "time/step_s": MetricName("s", "The whole step, from the end of the one before it."),
    "time/rollout_s": MetricName("s", "Generating completions."),
    "time/grade_s": MetricName("s", "Grading them, and the advantages."),
    "time/wait_s": MetricName(
        "s", "Waiting for completions that are sampled meanwhile, where sampling is a lane."
    ),
    "time/sampling_s": MetricName(
        "s", "The step's whole turn of the sampling lane, where sampling is a lane."
    ),
    "time/update_s": MetricName(
        "s", "Log-probabilities, forward, backward, optimizer; moving states in before it."
    ),
    "time/sync_s": MetricName("s", "New weights into the engine."),
    "time/checkpoint_s": MetricName(
        "s", "What the save after the step before held the loop up; the writing continues beside it."
    ),
    "time/eval_s": MetricName("s", "Held-out evaluation."),
    "time/unix_s": MetricName(
        "s", "Wall clock when the line was written, seconds since 1970. Written by `Metrics` itself."
    ),
    # --- speed and memory
    "perf/rollout_tokens_per_s": MetricName(
        "tokens/s", "Completion tokens per second of `time/rollout_s`, all engines."
    ),
    "perf/train_tokens_per_s": MetricName("tokens/s", "All tokens per second of `time/update_s`, all ranks."),
    "perf/tokens_per_s_per_gpu": MetricName(
        "tokens/s", "All tokens per second of the whole step, per GPU of the run's own nodes."
    ),
    "perf/mfu_train": MetricName(
        "fraction", "FLOPs of the update / peak of the GPUs (trainer/hardware/flops.py); absent if unknown."
    ),
    "perf/hfu_train": MetricName(
        "fraction", "The same with the activations that gradient checkpointing computes again."
    ),
    "perf/mfu_rollout": MetricName("fraction", "FLOPs of generation, prefill and decode / peak of the GPUs."),
    "perf/passes": MetricName("count", "Forward and backward passes of a rank over the step's updates."),
    "perf/ranks_busy_fraction": MetricName(
        "fraction", "Share of the updates in which ranks compute, by the schedule; the rest they wait."
    ),
    "perf/gathered_gib": MetricName(
        "GiB", "Weights that ZeRO-3 gathered on a rank in the updates; 0 at other stages."
    ),
    "perf/disk_free_gib": MetricName("GiB", "Free where the run is written, on the node that has the least."),
    "perf/host_memory_fraction": MetricName(
        "fraction", "Share of the memory in use, on the node that uses the most."
    ),
    "perf/shm_free_gib": MetricName("GiB", "Free in /dev/shm, on the node that has the least."),
    "perf/network_gbit_per_s": MetricName(
        "Gbit/s", "Sent by a node over network and InfiniBand, mean of the nodes."
    ),
    "perf/gpu_busy_fraction": MetricName(
        "fraction", "GPU use, mean over the step and all GPUs; a GPU that waits is busy."
    ),
    "perf/gpu_memory_gib_max": MetricName("GiB", "Memory in use on the fullest GPU."),
    "perf/gpu_power_w": MetricName("W", "Power of a GPU, mean; one that waits in a collective draws less."),
    "perf/gpu_temperature_c_max": MetricName("C", "Temperature of the hottest GPU."),
    "perf/gpu_slowed_fraction": MetricName(
        "fraction", "Share of readings with a slowdown by heat or power brake."
    ),
    "perf/peak_memory_gib": MetricName(
        "GiB", "Largest memory of a rank: of its GPU in learning; on CPU of its process."
    ),
    "perf/tool_s_max": MetricName(
        "s", "Time that slow tools of one engine took since the last update, calls added up; the largest."
    ),
    "perf/tool_wait_s_max": MetricName(
        "s",
        "Time for which an engine waited for results of slow tools since the last update; the largest. A"
        " larger `turns.tool_steps` and more `turns.tool_workers` shorten it.",
    ),
    "perf/fragments_gib_max": MetricName(
        "GiB", "Memory of the fullest GPU that lay free between tensors in learning, at most; GPUs only."
    ),
    "perf/grader_busy": MetricName(
        "count", "Requests that a reward server with a full queue sent back so far."
    ),
    "perf/grader_restarts": MetricName("count", "Grader processes killed and replaced so far."),
    "perf/judge_requests": MetricName(
        "count", "Requests sent to the judge by the run, as far as its checkpoints know."
    ),
    "perf/judge_remembered": MetricName(
        "count", "Answers that it had judged before, since the start of the process."
    ),
    "perf/checkpoint_save_s": MetricName("s", "The last save from start to commit, upload included."),
    "perf/checkpoint_stall_s": MetricName("s", "What it held the loop up."),
    "perf/checkpoint_gib": MetricName("GiB", "Its size over all ranks."),
    "perf/checkpoint_failures": MetricName("count", "Saves given up so far."),
    "perf/checkpoint_interval_steps": MetricName("steps", "Steps between saves, as chosen."),
    "perf/start_s": MetricName(
        "s", "Launch to ready for the first step; on the first line of every start, like its parts."
    ),
    "perf/start_launch_s": MetricName("s", "Of it: checks, the other nodes, Ray, the driver's own start."),
    "perf/start_place_s": MetricName("s", "Ranks placed, rows measured."),
    "perf/start_load_s": MetricName(
        "s", "Model and engine loaded; the checkpoint's files are fetched beside it."
    ),
    "perf/start_resume_s": MetricName("s", "The rest of the fetch, and the checkpoint read into the policy."),
    "perf/start_sync_s": MetricName("s", "The first weight sync and its check."),
    "perf/slots_used": MetricName(
        "fraction",
        "Share of the decode slots of the step's rollout that held an unfinished completion, if each"
        " completion had a slot until the last was done. Not with workers.",
    ),
    "perf/replayed_completions": MetricName(
        "count",
        "Completions taken from the rollout log in place of sampling, since the start of the process.",
    ),
    "perf/rollout_log_failures": MetricName(
        "count", "Steps since then whose log could not be written, sent or used."
    ),
    # --- the fleet (`fleet.workers`); counts are since the start of this process
    "fleet/wait_s": MetricName("s", "The trainer's wait for samples in this step: idle GPUs."),
    "fleet/publish_s": MetricName(
        "s", "Finding what changed of the weights, and waiting until the last is sent."
    ),
    "fleet/patch_mib": MetricName("MiB", "The newest version's changes, all ranks."),
    "fleet/workers": MetricName("count", "Workers that live and follow this attempt."),
    "fleet/idle_share": MetricName(
        "fraction", "Share of the workers' time in this step without a unit to sample."
    ),
    "fleet/completions_per_s": MetricName("1/s", "What these sample, by each one's last unit."),
    "fleet/units": MetricName("count", "Units whose samples were accepted."),
    "fleet/late": MetricName("count", "Units that a second worker sent after the first."),
    "fleet/doubled": MetricName("count", "Units that an idle worker was given too."),
    "fleet/again": MetricName("count", "Units given out anew after a loss, a refusal or a damaged object."),
    "fleet/lost": MetricName("count", "Workers that fell silent for `fleet.lost_s`."),
    "fleet/refused": MetricName(
        "count", "Units whose samples could not be trained on; why is in the bucket."
    ),
    "fleet/turned_away": MetricName(
        "count", "Workers told to end: for a probe that is not the policy's, or for samples refused."
    ),
    "fleet/forged": MetricName(
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
    "turns/calls_": "Mean number of an episode's answered calls of a tool that prompts offer.",
    "eval/accuracy_": "Held-out accuracy on one source of a data set that has several.",
    "fleet/sampled_": "Completions since the last line that workers on one kind of GPU sampled.",
}
"""Names that end in what the data, or a driver, calls them."""


def unknown_names(names: set[str] | list[str]) -> list[str]:
    """Those of `names` that the table lacks, sorted.

    A user's reward function may add its own; the trainer may not.
    """
    return sorted(name for name in set(names) - set(NAMES) if not name.startswith(tuple(PREFIXES)))
