"""The curves of a report, in order: data for trainer/observe/charts.py."""

from __future__ import annotations

from trainer.observe.charts import Chart, Line

HELD_OUT = Chart(
    "Accuracy",
    (
        Line("reward/accuracy", "training completions", 1),
        Line("eval/accuracy", "held out", 2, dots=True),
    ),
    "Share of correct completions: those sampled for training, and those to held-out questions.",
    percent=True,
    wide=True,
)
CHARTS = (
    Chart(
        "Reward", (Line("reward/mean", "mean", 1), Line("reward/std", "std", 8)), "Before any normalization."
    ),
    Chart(
        "Completion format",
        (Line("reward/format", "well-formed", 3), Line("reward/no_answer_rate", "no answer", 4)),
        "Completions in the form that rewards.answer asks for; no final answer found.",
        percent=True,
    ),
    Chart(
        "KL to the reference", (Line("kl/mean", "nats/token", 5),), "How far the policy has moved.", zero=True
    ),
    Chart("Entropy", (Line("entropy/mean", "nats/token", 6),), "Its collapse ends exploration.", zero=True),
    Chart(
        "Completion length",
        (Line("tokens/response_mean", "mean tokens", 1),),
        "The band spans the shortest and the longest completion of the step.",
        zero=True,
        band=("tokens/response_min", "tokens/response_max"),
    ),
    Chart(
        "Cut short, and groups all alike",
        (
            Line("tokens/truncated_fraction", "completions cut", 2),
            Line("group/zero_std_fraction", "groups without variance", 8),
        ),
        "Completions at the token limit; prompts whose completions all earned the same and teach nothing.",
        percent=True,
    ),
    Chart(
        "Turns",
        (Line("turns/replies_mean", "replies", 1), Line("turns/errors_mean", "wrong calls", 4)),
        "Of an episode, in the mean.",
        zero=True,
    ),
    Chart(
        "Episodes cut short, and tools that fail",
        (
            Line("turns/limit_fraction", "at the limit of turns", 2),
            Line("turns/images_fraction", "at the limit of images", 8),
            Line("turns/failed_fraction", "observations of a failure", 4),
        ),
        percent=True,
        skip_flat=True,
    ),
    Chart(
        "Time in tools",
        (Line("perf/tool_s_max", "s in tools", 1), Line("perf/tool_wait_s_max", "s waited for", 4)),
        "Slow tools of one engine, calls added up, and what the engine waited for them; the largest of each.",
        zero=True,
        skip_flat=True,
    ),
    Chart(
        "Losses",
        (Line("loss/total", "total", 1), Line("loss/policy", "policy", 2)),
        "The policy loss is near 0 by construction where each step is one update.",
    ),
    Chart("Gradient norm", (Line("grad/norm", "before clipping", 4),), log=True),
    Chart(
        "Engine against policy",
        (Line("mismatch/logprob_abs_mean", "mean", 6), Line("mismatch/logprob_abs_max", "max", 4)),
        "Difference of log-probabilities of the sampled tokens, in nats.",
        log=True,
    ),
    Chart(
        "Older weights against the policy",
        (Line("staleness/logprob_abs_mean", "mean", 6), Line("staleness/logprob_abs_max", "max", 4)),
        "The same where older weights sampled the step: what the rollout correction weighs.",
        log=True,
    ),
    Chart(
        "Steps that samples are behind",
        (Line("rollout/staleness_mean", "mean", 6), Line("rollout/staleness_max", "most", 4)),
        "Updates since the weights that sampled the step.",
        zero=True,
    ),
    Chart(
        "Waiting for rollout workers",
        (Line("fleet/wait_s", "s", 8),),
        "Seconds of each step in which the trainer had nothing to learn from.",
        zero=True,
    ),
    Chart(
        "Rollout workers without a unit",
        (Line("fleet/idle_share", "share of their time", 2),),
        "What is paid for and not used: near 0 where the trainer waits, larger where there are too many.",
        percent=True,
    ),
    Chart("Rollout workers alive", (Line("fleet/workers", "workers", 1),), zero=True),
    Chart(
        "Clipping",
        (Line("ratio/clip_fraction", "tokens clipped", 2),),
        "Share of tokens whose surrogate was clipped.",
        percent=True,
    ),
    Chart("Cross-entropy", (Line("sft/loss", "nats/token", 1),), "Of the completion tokens."),
    Chart("Learning rate", (Line("optim/lr", "", 8),), zero=True, skip_flat=True),
    Chart(
        "Grading trouble",
        (Line("reward/timeout_rate", "timeouts", 4), Line("reward/error_rate", "errors", 2)),
        percent=True,
        skip_flat=True,
    ),
    Chart(
        "Rollout speed",
        (Line("perf/rollout_tokens_per_s", "tokens/s", 1),),
        "All engines together.",
        zero=True,
    ),
    Chart(
        "Decode slots",
        (Line("perf/slots_used", "used", 1),),
        "Share that held an unfinished completion while engines decoded.",
        percent=True,
        zero=True,
        skip_flat=True,
    ),
    Chart(
        "Training speed", (Line("perf/train_tokens_per_s", "tokens/s", 3),), "All ranks together.", zero=True
    ),
    Chart(
        "Model FLOPs utilisation",
        (Line("perf/mfu_train", "update", 1), Line("perf/mfu_rollout", "rollout", 2)),
        "Share of the GPUs' peak that the model's own arithmetic takes.",
        percent=True,
    ),
    Chart(
        "Checkpoints",
        (
            Line("perf/checkpoint_save_s", "s to save and upload", 1),
            Line("perf/checkpoint_stall_s", "s held up", 4),
        ),
        "The last save from start to commit, beside training, and what of it held training up.",
        zero=True,
        skip_flat=True,
    ),
    Chart("Peak memory", (Line("perf/peak_memory_gib", "GiB", 8),), "The fullest rank.", zero=True),
)
PHASE_COLORS = {
    "rollout": 1,
    "grade": 2,
    "wait": 8,
    "update": 3,
    "sync": 6,
    "checkpoint": 4,
    "eval": 7,
}
