"""A step towards a teacher: this trainer's ranks against plain transformers, one sample at a time. Not a test
itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.learning import plain
from tests.learning.one_rank import OneRank
from tests.learning.rank_scripts.steps_of_papers import adamw, images_of, loaded
from trainer.algorithm.credit import add_teacher_advantages, teacher_metrics
from trainer.algorithm.traces import Trace
from trainer.config import RunConfig
from trainer.data.processor import EncodedPrompt


def logprobs(
    model: Any, trace: Trace, prompt: EncodedPrompt, banned: list[int], temperature: float
) -> Tensor:
    """Log-probabilities of a completion that stands alone, in the distribution that is sampled from, [T]."""
    ids = torch.from_numpy(trace.tokens).long()[None]
    logits = model(input_ids=ids, **images_of(model, ids, prompt)).logits[0, trace.shared - 1 : -1]
    logits = (logits / temperature).index_fill(1, torch.tensor(banned), float("-inf"))
    return logits.log_softmax(-1).gather(1, ids[0, trace.shared :, None])[:, 0]


def plainly(config: RunConfig, traces: list[Trace], own: list[float], encoded: list, banned: list[int]):
    """Loss, weights and teacher's log-probabilities of one step. own: advantage of each completion by its
    group, to which coef * (log p_teacher - log p) comes at each token."""
    temperature = config.rollout.temperature
    teacher, model = loaded(config.algorithm.teacher), loaded(config.model.path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = sum(len(trace.learned) for trace in traces)
    loss, judged = 0.0, []
    for trace, group in zip(traces, own, strict=True):
        logp = logprobs(model, trace, encoded[trace.row], banned, temperature)
        with torch.no_grad():
            judged.append(logprobs(teacher, trace, encoded[trace.row], banned, temperature))
        advantage = group + config.algorithm.teacher_coef * (judged[-1] - logp.detach())
        part = -(torch.exp(logp - logp.detach()) * advantage).sum() / tokens
        part.backward()
        loss += part.item()
    weights = adamw(config, model)
    return {
        "loss": loss,
        "weights": weights,
        "judged": judged,
        "moved": plain.differences(weights, before)[0],
    }


def distillation_step(config: RunConfig, rank: int, port: int) -> dict:
    """The same step by both, and how far teacher and policy are apart at its start."""
    from transformers import AutoConfig

    encoded = plain.prompts(AutoConfig.from_pretrained(config.model.path))
    items = plain.items(encoded)
    traces = items.traces
    own = [float(values[0]) for values in items.advantages]
    worker = OneRank(config)
    theirs = plainly(config, traces, own, encoded, worker.prompter.banned_token_ids())

    worker.process.set_rank(rank, rank, "127.0.0.1", port)
    worker.learner.start(10)  # no engine: what is sampled is given
    worker.reader.encoded = lambda split, row: encoded[row]
    scored = worker.logprobs([[trace] for trace in traces], reference=True)
    judged, old = scored["reference"], scored["old"]
    trainable = add_teacher_advantages(items.advantages, judged, old, config.algorithm.teacher_coef)
    stats = worker.step(replace(items, advantages=trainable, old=old), config.algorithm.micro_batch_tokens)
    ours = {}
    for group in worker.policy.weights.groups(1 << 30):
        ours |= {name: tensor.clone() for name, tensor in group}
    gaps = [np.abs(mine - other.numpy()).max() for mine, other in zip(judged, theirs["judged"], strict=True)]
    return {
        "loss": stats["loss/total"],
        "their_loss": theirs["loss"],
        "weights": plain.differences(ours, theirs["weights"])[0],
        "moved": theirs["moved"],
        "judged": float(max(gaps)),
        "passes": stats["perf/passes"],
    } | teacher_metrics(judged, old)
