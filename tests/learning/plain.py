"""What packed passes are held to: samples of real raggedness, and the same loss by transformers' own padded
forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tests.learning.one_rank import trace, trainable
from trainer.algorithm.batching import TrainBatch
from trainer.data.processor import EncodedPrompt

SIDES = [[(4, 5)], [], [(7, 9), (3, 2)], [(2, 2)], [(5, 11), (1, 3), (6, 6)]]
"""Images per prompt, each of so many merged tokens."""
LENGTHS = [[17, 3, 60, 1], [9, 30], [25, 25, 5], [44], [2, 70, 33, 8, 21]]
"""Completions per prompt."""


def prompts(config: Any) -> list[EncodedPrompt]:
    """One per entry of SIDES; text alone for a model that reads nothing else. config: transformers' own."""
    rng, out = random.Random(0), []
    image_token_id = getattr(config, "image_token_id", None)
    patch = config.vision_config.patch_size if image_token_id is not None else 0
    for row, sides in enumerate(SIDES):
        ids, grids = text(rng, 8), []
        for h, w in sides if image_token_id is not None else []:
            ids += [image_token_id] * (h * w) + text(rng, rng.randint(1, 6))
            grids.append([1, 2 * h, 2 * w])
        ids += text(rng, rng.randint(5, 40))
        g = torch.Generator().manual_seed(row)
        patches = sum(h * w for _, h, w in grids)
        pixels = torch.randn(patches, 3 * 2 * patch**2, generator=g) if grids else None
        out.append(EncodedPrompt(ids, pixels, torch.tensor(grids) if grids else None))
    return out


def items(encoded: list[EncodedPrompt]) -> TrainBatch:
    rng = random.Random(1)
    traces = []
    advantages = []
    for row, lengths in enumerate(LENGTHS):
        for n in lengths:
            traces.append(trace(row, encoded[row].token_ids, text(rng, n)))
            advantages.append(rng.gauss(0, 1))
    return trainable(traces, advantages)


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(300) for _ in range(n)]


def padded_gradients(
    folder: Path | str,
    encoded: list[EncodedPrompt],
    samples: TrainBatch,
    temperature: float = 1.0,
    adapt: Callable[[Any], Any] = lambda model: model,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(log-probabilities [N], gradients by name) of sum(-advantage log p) / N; one process, one padded batch,
    none of the trainer's code: transformers' own positions, masks and attention. adapt: what is done to the
    model first."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    plainly: Any = {
        "dtype": torch.float32,
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",  # a loop over experts
    }
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder, **plainly)
    except ValueError:
        model = AutoModelForCausalLM.from_pretrained(folder, **plainly)
    model = adapt(model)
    traces = samples.traces
    rows = [torch.from_numpy(t.tokens).long() for t in traces]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    seen = [encoded[t.row] for t in traces if encoded[t.row].grid_thw is not None]
    images = {}
    if seen:
        images = {
            "pixel_values": torch.cat([e.pixel_values for e in seen]),
            "image_grid_thw": torch.cat([e.grid_thw for e in seen]),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    logp = (model(input_ids=ids, attention_mask=mask, **images).logits.float() / temperature).log_softmax(-1)
    found = []
    for b, t in enumerate(traces):
        at = logp[b, t.shared - 1 : len(t.tokens) - 1]
        found.append(at.gather(1, torch.from_numpy(t.completion).long()[:, None])[:, 0])
    loss = (
        -sum(float(a[0]) * x.sum() for a, x in zip(samples.advantages, found, strict=True)) / samples.tokens
    )
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None for g in gradients.values())
    return torch.cat(found).detach(), gradients


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative differences of all gradients together, and of the worst tensor."""
    assert ours.keys() == theirs.keys()
    total = sum(float((ours[n] - g).double().square().sum()) for n, g in theirs.items())
    whole = sum(float(g.double().square().sum()) for g in theirs.values())
    worst = max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items())
    return (total / whole) ** 0.5, worst
