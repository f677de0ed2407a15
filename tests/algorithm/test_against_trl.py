"""Loss, gradient, advantages and rollout correction against TRL's own code, on padded rows of unequal
lengths."""

import inspect
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from trainer.algorithm.advantages import RewardParts, batch_norm, gdpo, group_mean, group_norm, leave_one_out
from trainer.algorithm.losses import grpo_loss, rollout_weights, token_weights

LENGTHS = torch.tensor([5, 2, 7, 1, 4, 3])
LONGEST, GROUP = 9, 3
MASK = (torch.arange(7) < LENGTHS[:, None]).float()


@pytest.fixture(scope="module")
def trl():
    from trl.trainer import grpo_trainer, rloo_trainer

    return SimpleNamespace(grpo=grpo_trainer, rloo=rloo_trainer)


@pytest.fixture
def draw():
    """Log-probabilities of four models and one advantage per sequence, padded."""
    g = torch.Generator().manual_seed(3)
    new = torch.randn(6, 7, generator=g) - 2
    old, ref, rollout = (new + 0.4 * torch.randn(6, 7, generator=g) for _ in range(3))
    return SimpleNamespace(new=new, old=old, ref=ref, rollout=rollout, advantages=torch.randn(6, generator=g))


def flat(x):
    return x[MASK.bool()]


def block(function, first, last, names):
    """Runs the lines of a function of TRL's from `first` up to before `last`, and returns its variables."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    stop = next(i for i, line in enumerate(lines) if i > start and last in line)
    exec(textwrap.dedent("\n".join(lines[start:stop])), vars(inspect.getmodule(function)), names)
    return names


def theirs(trl, d, correction=None, **settings):
    """Loss and gradient by `GRPOTrainer._compute_loss`."""
    options = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
    } | settings
    logprobs = d.new.clone().requires_grad_()

    def same(x, **_):
        return x

    trainer = SimpleNamespace(
        **options,
        args=SimpleNamespace(delta=options["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(gather=same, reduce=same, num_processes=1),
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(6, 7), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1),
        "prompt_mask": torch.ones(6, 1),
        "completion_ids": torch.zeros(6, 7),
        "completion_mask": MASK,
        "advantages": d.advantages,
        "old_per_token_logps": d.old,
        "ref_per_token_logps": d.ref,
        "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": correction,
    }
    loss = trl.grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), flat(logprobs.grad)


def ours(d, denominator, correction=None, **options):
    logprobs = flat(d.new).clone().requires_grad_()
    advantages = torch.repeat_interleave(d.advantages, LENGTHS)
    weights = token_weights(LENGTHS, denominator, int(LENGTHS.sum()), 6, LONGEST)
    options = {"clip_low": 0.2, "clip_high": 0.2} | options
    loss = grpo_loss(
        logprobs,
        flat(d.old),
        advantages,
        weights,
        lengths=LENGTHS,
        ref_logprobs=flat(d.ref),
        correction=correction,
        **options,
    )
    loss.total.backward()
    assert logprobs.grad is not None
    return loss.total.detach(), logprobs.grad


@pytest.mark.parametrize(
    ("denominator", "options", "settings"),
    [
        ("tokens", {}, {"loss_type": "dapo"}),
        ("sequences", {}, {"loss_type": "grpo"}),
        ("constant", {}, {"loss_type": "dr_grpo"}),
        ("tokens", {"kl_coef": 0.1}, {"beta": 0.1}),
        ("sequences", {"kl_coef": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
        ("tokens", {"clip_high": 0.28}, {"epsilon_high": 0.28}),
        (
            "sequences",
            {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        ("sequences", {"kind": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (
            "tokens",
            {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.3},
            {"loss_type": "cispo", "epsilon_high": 1.3},
        ),
    ],
)
def test_loss_and_gradient_are_trl_s(trl, draw, denominator, options, settings):
    loss, grad = ours(draw, denominator, **options)
    want, want_grad = theirs(trl, draw, **settings)
    assert float(loss) == pytest.approx(float(want), rel=1e-6, abs=1e-7)
    assert torch.allclose(grad, want_grad, rtol=1e-5, atol=1e-8) and bool(grad.any())


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction_is_trl_s(trl, draw, kind, level):
    names = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=f"{level}_{kind}",
            vllm_importance_sampling_clip_min=0.6,
            vllm_importance_sampling_clip_max=1.5,
        ),
        "tool_mask": None,
        "completion_mask": MASK,
        "old_per_token_logps": draw.old,
        "sampling_per_token_logps": draw.rollout,
    }
    first = "if self.use_vllm and self.vllm_importance_sampling_correction:"
    last = "# Compute the per-token log probabilities for the reference model"
    block(trl.grpo.GRPOTrainer._generate_and_score_completions, first, last, names)
    want = names["vllm_importance_sampling_ratio"]
    found, beyond = rollout_weights(flat(draw.old - draw.rollout), LENGTHS, kind, level, 0.6, 1.5)
    assert (
        torch.allclose(found, flat(want.expand(6, 7)), rtol=1e-5)
        and bool(beyond.any())
        and not bool(beyond.all())
    )
    loss, grad = ours(draw, "tokens", found)
    theirs_loss, theirs_grad = theirs(trl, draw, want)
    assert torch.allclose(loss, theirs_loss, rtol=1e-5) and torch.allclose(
        grad, theirs_grad, rtol=1e-5, atol=1e-8
    )


PARTS = torch.tensor([[1.0, 0.2], [0.0, 0.2], [1.0, 0.6], [0.0, 0.1], [1.0, 0.9], [0.0, 0.0]])
WEIGHTS, GROUPS = torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("found", "scale", "aggregation"),
    [
        (lambda r: group_norm(r.total, GROUPS, 1e-4), "group", "sum_then_normalize"),
        (lambda r: group_mean(r.total, GROUPS), "none", "sum_then_normalize"),
        (lambda r: batch_norm(r.total, GROUPS, 1e-4), "batch", "sum_then_normalize"),
        (lambda r: gdpo(r.parts, r.weights, GROUPS, 1e-4), "group", "normalize_then_sum"),
    ],
)
def test_advantages_are_trl_s(trl, found, scale, aggregation):
    settings = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_weights=WEIGHTS,
        reward_funcs=[None, None],
    )
    names = {
        "self": settings,
        "rewards_per_func": PARTS,
        "num_generations": GROUP,
        "device": "cpu",
        "unscorable_mask": torch.zeros(6, dtype=torch.bool),
    }
    function = trl.grpo.GRPOTrainer._generate_and_score_completions
    block(
        function, 'if self.multi_objective_aggregation == "sum_then', "# Unscorable completions (every", names
    )
    values = found(RewardParts(("accuracy", "format"), PARTS.double(), WEIGHTS.double()))
    assert torch.allclose(values.float(), names["advantages"], atol=1e-6)


def test_leave_one_out_with_the_kl_in_the_reward_is_trl_s(trl, draw):
    names = {
        "self": SimpleNamespace(beta=0.05, normalize_advantages=False),
        "old_per_token_logps": draw.old,
        "ref_per_token_logps": draw.ref,
        "completion_mask": MASK,
        "gather": lambda x: x,
        "rewards": PARTS[:, 0].clone(),
        "num_generations": GROUP,
    }
    function = trl.rloo.RLOOTrainer._generate_and_score_completions
    block(function, "# Include the KL penalty in the reward", "# Unscorable completions carry", names)
    kl = torch.stack([x.sum() for x in flat(draw.old - draw.ref).split(LENGTHS.tolist())])
    found = leave_one_out(PARTS[:, 0] - 0.05 * kl, GROUPS)
    assert torch.allclose(found.float(), names["advantages"], atol=1e-6)
