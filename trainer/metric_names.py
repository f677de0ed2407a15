"""The fixed table of metric names: what each is, and its unit. docs/metrics.md is this table, held to it by a test.

Names starting with `time/` or `perf/` may differ between equal runs; all others are the same to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """One metric."""

    unit: str
    meaning: str


NAMES: dict[str, Name] = {
    # --- what the policy earns
    "reward/mean": Name("reward", "Mean reward of the step's answers, before any normalisation."),
    "reward/std": Name("reward", "Standard deviation of the same, over all answers of the step."),
    "reward/accuracy": Name(
        "fraction", "Mean accuracy reward: with the built-in grader, the share of correct answers."
    ),
    "reward/format": Name("fraction", "Share of answers with exactly one think and one answer block."),
    "reward/no_answer_rate": Name("fraction", "Share of answers in which no final answer was found."),
    "reward/timeout_rate": Name("fraction", "Share of answers whose grader was killed at its deadline."),
    "reward/error_rate": Name("fraction", "Share of answers on which the grader raised an error."),
    "reward/restarts": Name("count", "Grader processes replaced in this step."),
    "reward/running_mean": Name("reward", "Running mean that `algorithm.normalize_reward` subtracts."),
    "reward/running_std": Name("reward", "Running standard deviation that it divides by."),
    "group/zero_std_fraction": Name(
        "fraction", "Share of prompts whose answers all earned the same: they teach nothing."
    ),
    # --- the update
    "loss/total": Name("loss", "What was minimised: policy + kl_coef * kl. Mean over the step's updates."),
    "loss/policy": Name("loss", "The clipped surrogate. Near 0 by construction where each step is one update."),
    "loss/kl": Name("nats/token", "The KL estimator's weighted sum, before kl_coef."),
    "kl/mean": Name("nats/token", "Estimated KL(policy || reference) of the answers before the update."),
    "entropy/mean": Name("nats/token", "Entropy of the policy's next-token distribution; its collapse ends learning."),
    "ratio/mean": Name("ratio", "Mean probability ratio of policy to the policy that the update started from."),
    "ratio/clip_fraction": Name("fraction", "Share of tokens whose surrogate was clipped."),
    "grad/norm": Name("norm", "Global gradient norm before clipping; mean over the step's updates."),
    "optim/lr": Name("", "Learning rate of the step's last update."),
    "optim/updates": Name("count", "Optimizer steps taken so far."),
    # --- engine against policy
    "mismatch/logprob_abs_mean": Name("nats", "Mean |log-prob of the engine - of the policy| over the sampled tokens."),
    "mismatch/logprob_abs_max": Name("nats", "Largest of the same."),
    "mismatch/kl": Name("nats/token", "KL(engine || policy) on the sampled tokens, k3 estimator."),
    # --- the answers
    "tokens/prompt_mean": Name("tokens", "Mean prompt length, image tokens included."),
    "tokens/prompt_max": Name("tokens", "Longest prompt."),
    "tokens/response_mean": Name("tokens", "Mean answer length."),
    "tokens/response_min": Name("tokens", "Shortest answer."),
    "tokens/response_max": Name("tokens", "Longest answer."),
    "tokens/truncated_fraction": Name("fraction", "Share of answers cut at `rollout.max_tokens`."),
    "tokens/step": Name("tokens", "Prompt and answer tokens of the step, over all ranks."),
    # --- the data
    "data/epoch": Name("passes", "Passes over the data so far, fractional."),
    "data/left_out": Name("rows", "Rows left out so far because their prompt is too long."),
    # --- held out
    "eval/accuracy": Name("fraction", "Share of correct answers on the held-out split."),
    "eval/format": Name("fraction", "Share of well-formed answers on it."),
    "eval/reward": Name("reward", "Mean reward on it."),
    "eval/response_mean": Name("tokens", "Mean answer length on it."),
    "eval/truncated_fraction": Name("fraction", "Share of answers on it cut at their longest."),
    "eval/samples": Name("answers", "Answers that were graded."),
    # --- supervised fine-tuning
    "sft/loss": Name("nats/token", "Mean cross-entropy of the answer tokens."),
    "sft/token_accuracy": Name("fraction", "Share of answer tokens that are the policy's most likely one."),
    "sft/tokens": Name("tokens", "Answer tokens of the step, over all ranks."),
    # --- time
    "time/step_s": Name("s", "The whole step."),
    "time/rollout_s": Name("s", "Generating answers."),
    "time/grade_s": Name("s", "Grading them."),
    "time/logprob_s": Name("s", "Log-probabilities of policy and reference before the update."),
    "time/update_s": Name("s", "Forward, backward, optimizer."),
    "time/sync_s": Name("s", "New weights into the engine."),
    "time/offload_s": Name("s", "Putting engine or optimizer states away, and fetching them back."),
    "time/checkpoint_s": Name("s", "What a checkpoint holds the loop up; the writing itself goes on beside it."),
    "time/eval_s": Name("s", "Held-out evaluation."),
    "time/data_s": Name("s", "Reading and preparing rows."),
    "time/unix_s": Name("s", "Wall clock when the line was written, seconds since 1970. Written by `Metrics` itself."),
    # --- speed and memory
    "perf/rollout_tokens_per_s": Name("tokens/s", "Sampled answer tokens per second of `time/rollout_s`, all engines."),
    "perf/train_tokens_per_s": Name("tokens/s", "Prompt and answer tokens per second of `time/update_s`, all ranks."),
    "perf/mfu_train": Name(
        "fraction", "Model FLOPs of the update / peak of the GPUs; absent where the peak is unknown."
    ),
    "perf/hfu_train": Name("fraction", "The same with recomputed activations counted."),
    "perf/mfu_logprob": Name("fraction", "Model FLOPs of the log-probability passes / peak."),
    "perf/mfu_rollout": Name("fraction", "Model FLOPs of generation (prefill and decode) / peak."),
    "perf/peak_memory_gib": Name("GiB", "Largest memory of a worker so far: of its GPU, or of its process on CPU."),
}


def unknown(names: set[str] | list[str]) -> list[str]:
    """Those of `names` that the table lacks, sorted. A user's reward function may add its own; the trainer may not."""
    return sorted(set(names) - set(NAMES))
