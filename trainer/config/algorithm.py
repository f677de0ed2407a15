"""The objective: advantage, surrogate, aggregation, KL, rollout correction, sampling; published sets of
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trainer.config.ranges import ranged_field

AdvantageKind = Literal[
    "group_norm", "group_mean", "batch_norm", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gdpo"
]
SurrogateKind = Literal["ppo", "gspo", "cispo", "gmpo"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What is maximized. Formulas and their sources: docs/algorithms.md."""

    advantage: AdvantageKind = "group_norm"
    """Advantage estimator (trainer/algorithm/advantages.py). group_norm: (r - group mean) / (group std +
    eps)."""
    advantage_eps: float = ranged_field(1e-6, least=0)
    """Added to the standard deviations (unbiased) that rewards are divided by."""
    normalize_reward: bool = False
    """Divide rewards by their running standard deviation after subtracting the running mean
    (--normalize_reward)."""
    surrogate: SurrogateKind = "ppo"
    """ppo: clipped ratio per token. gspo: of the sequence. cispo: clipped ratio as a constant weight. gmpo:
    geometric mean of clipped ratios."""
    clip_low: float = ranged_field(0.2, least=0, most=1)
    """Lower clip of the probability ratio: 1 - clip_low; for gmpo of its logarithm: -clip_low."""
    clip_high: float = ranged_field(0.2, least=0)
    """Upper clip of the probability ratio: 1 + clip_high; for gmpo of its logarithm: clip_high."""
    dual_clip: float = ranged_field(0.0, least=0)
    """Largest ratio that counts for a negative advantage, above 1 (3 in the paper); 0: no limit. ppo and
    gspo."""
    loss_denominator: Literal["tokens", "sequences", "constant"] = "tokens"
    """Sum over tokens / all tokens of the optimizer step; mean of per-sequence means; or sum over tokens /
    (sequences x rollout.max_tokens), which no length biases. Always global."""
    kl_coef: float = ranged_field(1e-3, least=0)
    """Weight of KL(policy || reference), the first one if kl_target is set; 0 builds no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term per token beside the surrogate. reward: subtracted from the rewards before the
    advantages."""
    kl_estimator: Literal["", "k1", "k2", "k3"] = ""
    """Estimator of the KL, per token; empty: k3 in the loss, k1 in the reward. In the loss k2 or k3: k1's
    gradient has mean zero. In the reward k1: the gradient of the others' is not the KL's."""
    kl_target: float = ranged_field(0.0, least=0)
    """KL in nats per token that kl_coef is steered towards, step by step; 0: kl_coef stays as it is."""
    kl_horizon: int = ranged_field(10_000, least=1)
    """Completions over which kl_coef changes by at most 20%."""
    rollout_correction: Literal["off", "truncate", "mask"] = "truncate"
    """Weight of a token's loss for what engine and policy disagree on: policy / engine probability, cut at
    its bounds (truncate), or 0 beyond them (mask)."""
    correction_level: Literal["", "token", "sequence", "geometric"] = ""
    """Ratio of each token, of the sequence (product), or the geometric mean of its tokens' ratios; empty:
    token, and geometric for the objectives of sequences, gspo and gmpo, which have one ratio a sequence."""
    correction_low: float = ranged_field(0.0, least=0, most=1)
    """Lower bound of the ratio."""
    correction_high: float = ranged_field(2.0, least=1)
    """Upper bound of the ratio."""
    mask_truncated: bool = False
    """Leave completions that were cut at rollout.max_tokens out of the loss; they still count in their
    group."""
    overlong_buffer: float = ranged_field(0.0, least=0, most=1)
    """Last share of rollout.max_tokens in which the reward falls linearly, by overlong_penalty at its end; 0:
    none."""
    overlong_penalty: float = ranged_field(1.0, least=0)
    """What a completion as long as rollout.max_tokens loses."""
    refill_rounds: int = ranged_field(0, least=0)
    """Dynamic sampling: further rounds of a step in which groups of equal reward are replaced by new prompts;
    0: none. Those that are left after the last round are trained on as they are."""
    teacher: str = ""
    """Local directory or hub id of a model to distil from, on the policy's own completions: each token's
    advantage gets teacher_coef times how much likelier the teacher finds it. It stands in the reference's
    place, so kl_coef must be 0. Empty: none."""
    teacher_revision: str = ""
    """Pinned hub revision of the teacher; empty for a local directory."""
    teacher_coef: float = ranged_field(1.0, above=0)
    """Weight of log p_teacher - log p_policy in a token's advantage."""
    gamma: float = ranged_field(1.0, above=0, most=1)
    """Discount of the advantage towards earlier tokens: A_t = gamma^(T-1-t) A."""
    samples_per_update: int = ranged_field(0, least=0)
    """Samples per optimizer step (the original's --train_batch_size); 0: all of the step's."""
    epochs: int = ranged_field(1, least=1)
    """Passes over each step's samples (the original's --max_epochs)."""
    micro_batch_tokens: int = ranged_field(0, least=0)
    """Tokens per forward and backward pass on one rank, a prompt counted once for its completions in the
    pass; changes neither loss nor gradient. 0: in a recipe, as many as its GPUs have memory for by the plan;
    else as many as 8 GiB of saved activations allow. At most 16,384, at least the longest sample."""
    logprob_tokens: int = ranged_field(0, least=0)
    """The same for passes without gradients (old and reference log-probabilities); 0: twice
    micro_batch_tokens."""

    @property
    def kl_estimated_by(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the KL, the default filled in."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def of_sequences(self) -> bool:
        """Whether the surrogate has one ratio per sequence."""
        return self.surrogate in ("gspo", "gmpo")

    @property
    def corrected_at(self) -> Literal["token", "sequence", "geometric"]:
        """The level of the rollout correction, the default filled in."""
        return self.correction_level or ("geometric" if self.of_sequences else "token")

    PRESETS: ClassVar[dict[str, dict[str, Any]]]
    """Published sets of options by name: `--set algorithm=dapo`."""


_OBJECTIVE = (
    *("advantage", "surrogate", "clip_low", "clip_high", "dual_clip", "loss_denominator"),
    *("kl_in", "kl_estimator", "kl_target", "mask_truncated", "overlong_buffer", "overlong_penalty"),
    *("refill_rounds", "gamma"),
)
"""What every preset sets, besides kl_coef. The rest, such as batch sizes and the rollout correction, stays as
it is."""

Algorithm.PRESETS = {
    name: {key: getattr(Algorithm, key) for key in _OBJECTIVE} | {"kl_coef": 0.0} | options
    for name, options in {
        "grpo": {"loss_denominator": "sequences", "kl_coef": 0.04},
        "dr_grpo": {"advantage": "group_mean", "loss_denominator": "constant"},
        "dapo": {"clip_high": 0.28, "overlong_buffer": 0.2, "refill_rounds": 9},
        "gspo": {"surrogate": "gspo", "loss_denominator": "sequences", "clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "gmpo": {"surrogate": "gmpo", "loss_denominator": "sequences", "clip_low": 0.4, "clip_high": 0.4},
        "gdpo": {"advantage": "gdpo"},
        "rloo": {
            "advantage": "rloo",
            "loss_denominator": "constant",
            "kl_coef": 0.05,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        "reinforce_pp": {
            "advantage": "reinforce_pp",
            "kl_coef": 0.01,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        "reinforce_pp_baseline": {
            "advantage": "reinforce_pp_baseline",
            "kl_coef": 0.01,
            "kl_estimator": "k2",
        },
    }.items()
}
