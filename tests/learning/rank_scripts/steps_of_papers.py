"""Objectives as their papers write them, and an optimizer step by them: plain transformers, one sample at a
time, none of the trainer's code. What a rank of the trainer is held to. Not a test itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from tests.learning import plain
from tests.learning.one_rank import OneRank, trainable, with_logprobs
from tests.learning.scenarios import start as start_rank
from trainer.algorithm.advantages import RewardParts, estimate_advantages
from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.traces import Trace
from trainer.config import Algorithm, RunConfig
from trainer.data.processor import EncodedPrompt

LONGEST = 80
"""`rollout.max_tokens`, the constant of Dr. GRPO."""
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"rollout_correction": "truncate"},
    "dr_grpo": {"rollout_correction": "off"},
    "dapo": {"rollout_correction": "truncate"},
    "gspo": {"rollout_correction": "off"},
    "cispo": {"rollout_correction": "off"},
    "gmpo": {"rollout_correction": "off"},
    "rloo": {"rollout_correction": "off", "kl_coef": 0.0},
}
"""Objective -> what is changed of its preset."""


@dataclass(frozen=True)
class Sampled:
    """What a paper's formula needs of one completion; [T] each."""

    advantage: float
    old: Tensor
    reference: Tensor
    engine: Tensor


def advantages(name: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Advantage of every completion, group by group: Dr. GRPO's, RLOO's, or that of DeepSeekMath's eq. 3."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(own) / len(own)
        if len(own) == 1 or max(own) == min(own):
            out.append(0.0)
        elif name == "dr_grpo":
            out.append(reward - mean)
        elif name == "rloo":
            out.append(reward - (sum(own) - reward) / (len(own) - 1))
        else:
            variance = sum((r - mean) ** 2 for r in own) / (len(own) - 1)
            out.append((reward - mean) / (math.sqrt(variance) + 1e-6))
    return out


def loss(name: str, logp: Tensor, one: Sampled, samples: int, tokens: int) -> Tensor:
    """A completion's part of the step's loss. samples, tokens: of the whole step."""
    a, length = one.advantage, len(logp)
    ratio = torch.exp(logp - one.old)
    trusted = torch.exp(one.old - one.engine).clamp(max=2.0)
    if name == "grpo":
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * trusted
        kl = torch.exp(one.reference - logp) - (one.reference - logp) - 1
        return -(surrogate - 0.04 * kl).mean() / samples
    if name == "dapo":
        return -(torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) * trusted).sum() / tokens
    if name in ("dr_grpo", "rloo"):
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / (samples * LONGEST)
    if name == "cispo":
        return -(ratio.clamp(0.0, 5.0).detach() * a * logp).sum() / tokens
    if name == "gspo":
        whole = torch.exp((logp - one.old).sum() / length)
        return -torch.minimum(whole * a, whole.clamp(1 - 3e-4, 1 + 4e-4) * a) / samples
    assert name == "gmpo"
    sign = math.copysign(1.0, a)
    wide = logp - one.old
    kept = sign * torch.minimum(sign * wide, sign * wide.clamp(-0.4, 0.4))
    return -a * torch.exp(kept.sum() / length) / samples


def logprobs(model: Any, trace: Trace, prompt: EncodedPrompt) -> Tensor:
    """Log-probabilities of a completion that stands alone, [T]."""
    ids = torch.from_numpy(trace.tokens).long()[None]
    logits = model(input_ids=ids, **images_of(model, ids, prompt)).logits[0, trace.shared - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, trace.shared :, None])[:, 0]


def images_of(model: Any, ids: Tensor, prompt: EncodedPrompt) -> dict[str, Tensor]:
    """What the model's forward pass takes besides token ids, [1, L]."""
    if prompt.grid_thw is None or prompt.pixel_values is None:
        return {}
    return {
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.grid_thw,
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }


def loaded(folder: str) -> Any:
    """The model as its users load it, in fp32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    try:
        return AutoModelForImageTextToText.from_pretrained(folder, **options)
    except ValueError:
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def stepped(config: RunConfig, name: str, traces: list[Trace], drawn: list[Sampled], encoded: Any) -> dict:
    """One step of AdamW by a paper's formula: loss, the gradient's norm, weights, and how far they moved."""
    model = loaded(config.model.path)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens = sum(len(trace.learned) for trace in traces)
    total = 0.0
    for trace, one in zip(traces, drawn, strict=True):
        part = loss(name, logprobs(model, trace, encoded[trace.row]), one, len(traces), tokens)
        part.backward()
        total += part.item()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    weights = adamw(config, model)
    moved = plain.differences(weights, before)[0]
    return {"loss": total, "norm": norm, "weights": weights, "moved": moved}


def adamw(config: RunConfig, model: Any) -> dict[str, Tensor]:
    """The weights after one step of torch's AdamW by the model's gradients."""
    parameters = dict(model.named_parameters())
    o = config.optimizer
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=o.learning_rate, betas=o.betas, eps=o.eps).step()
    return {n: p.detach() for n, p in parameters.items()}


def drawn_for(name: str, items: TrainBatch, start: list[Tensor], rewards: list[float]) -> list[Sampled]:
    """Old, reference and engine log-probabilities about those of the model, so that ratios lie on both sides
    of every clip."""
    g = torch.Generator().manual_seed(7)
    values = advantages(name, rewards, [trace.group for trace in items.traces])
    out = []
    for logp, advantage in zip(start, values, strict=True):
        near = [logp + size * torch.randn(len(logp), generator=g) for size in (0.25, 0.5)]
        engine = near[0] + 0.5 * torch.randn(len(logp), generator=g)
        out.append(Sampled(advantage, near[0], near[1], engine))
    return out


def steps_of_papers(config: RunConfig, rank: int, port: int) -> dict:
    """For every objective that the run's name lists: the trainer's step against the paper's, from the same
    weights."""
    names = config.run.name.split()
    encoded = plain.prompts(AutoConfig.from_pretrained(config.model.path))
    items = plain.items(encoded)
    rewards = [(0.0, 0.2, 1.0, 1.2)[(3 * i + i // 3) % 4] for i in range(len(items))]
    model = loaded(config.model.path)
    with torch.no_grad():
        found = [logprobs(model, trace, encoded[trace.row]) for trace in items.traces]
    drawn = {name: drawn_for(name, items, found, rewards) for name in names}
    theirs = {name: stepped(config, name, items.traces, drawn[name], encoded) for name in names}

    out = {}
    for name in names:
        worker = start_rank(replace(config, method="sft"), rank, port)
        worker.reader.encoded = lambda split, row: encoded[row]
        worker.policy.trained.module.model.lm_head.limit = 20_000
        out[name] = compared(worker, config, name, items, drawn[name], rewards, theirs[name])
    return out


def compared(
    worker: OneRank,
    config: RunConfig,
    name: str,
    items: TrainBatch,
    drawn: list[Sampled],
    rewards: list[float],
    theirs: dict,
) -> dict:
    """The trainer's own step: advantages from rewards, passes by its schedule, ZeRO's step."""
    algorithm = replace(config.algorithm, **(Algorithm.PRESETS[name] | OPTIONS[name]))
    settings = replace(config, method="grpo", algorithm=algorithm)
    worker.config = worker.policy.config = worker.learner.config = settings
    parts = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.tensor([trace.group for trace in items.traces])
    lengths = torch.tensor([len(trace.learned) for trace in items.traces])
    kinds = RewardParts(("reward/accuracy",), parts[:, None], torch.ones(1, dtype=torch.float64))
    values = estimate_advantages(algorithm, kinds, parts, groups, lengths).values
    batch = with_logprobs(items, [one.engine for one in drawn], [one.old for one in drawn])
    batch = replace(batch, advantages=trainable(items.traces, values.tolist()).advantages)
    if algorithm.kl_coef:
        batch = replace(batch, reference=[one.reference.numpy() for one in drawn])
    stats = worker.step(batch, config.algorithm.micro_batch_tokens, kl_coef=algorithm.kl_coef)
    ours = {}
    for group in worker.policy.weights.groups(1 << 30):
        ours |= {n: tensor.clone() for n, tensor in group}
    return {
        "loss": stats["loss/total"],
        "their_loss": theirs["loss"],
        "norm": abs(stats["grad/norm"] / theirs["norm"] - 1),
        "weights": plain.differences(ours, theirs["weights"])[0],
        "moved": theirs["moved"],
        "passes": stats["perf/passes"],
    }
