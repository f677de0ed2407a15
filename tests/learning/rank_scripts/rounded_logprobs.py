"""How far engine and policy are from the same weights computed in fp32. Runs inside scenarios.py; not a test
itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from tests.families import loader
from tests.learning.one_rank import OneRank
from trainer.algorithm.traces import Prompt, Trace

PROBE_TOKENS = 16


def rounded_logprobs(config, rank, port):
    """Differences of the engine, of the packed policy and of transformers' own padded forward pass, all in
    the run's dtype, from an fp32 pass of transformers over the same weights and sampled tokens; of an fp32
    pass whose embeddings alone are nudged; and of an engine that lost a layer from its policy."""
    family = loader(AutoConfig.from_pretrained(config.model.path).model_type)
    dtype = torch.bfloat16 if config.model.dtype == "bf16" else torch.float32

    def loaded() -> Any:
        return family.from_pretrained(config.model.path, dtype=dtype).eval()

    exact, plain = loaded().float(), loaded()  # before the policy's models come sharded
    worker = OneRank(config).start(rank, port)
    worker.sampler.load(0)
    prompts = [Prompt(group=row, row=row, seed=1000 + row) for row in range(4)]
    traces = worker.sample(prompts, 4, config.rollout.temperature)
    engine = np.concatenate([trace.logprobs for trace in traces])
    (policy,) = worker.logprobs([traces])["old"]
    alone = np.concatenate(worker.logprobs([[trace] for trace in traces])["old"])
    reference = padded(worker, exact, traces)

    found: dict[str, Any] = {
        "engine_exact": distance(engine, reference),
        "policy_exact": distance(policy, reference),
        "transformers_exact": distance(padded(worker, plain, traces), reference),
        "engine_policy": distance(engine, policy),
        "packed_alone": distance(policy, alone),
        "tokens": len(engine),
    }
    handle = exact.get_input_embeddings().register_forward_hook(nudged)
    found["nudged_exact"] = distance(padded(worker, exact, traces), reference)
    handle.remove()
    layers = exact.config.get_text_config().num_hidden_layers
    found["lost_layer"] = {}
    for layer in sorted({0, layers // 2, layers - 1}):
        load_without(worker, layer)
        samples = worker.sample(prompts, 4, config.rollout.temperature, PROBE_TOKENS)
        (scored,) = worker.logprobs([samples])["old"]
        of_engine = np.concatenate([trace.logprobs for trace in samples])
        found["lost_layer"][layer] = distance(of_engine, scored)
    return found


def padded(worker: OneRank, model: Any, traces: list[Trace]) -> np.ndarray:
    """The sampled tokens' log-probabilities by transformers' own forward pass over padded rows, [N]."""
    rows = [torch.from_numpy(trace.tokens.astype(np.int64)) for trace in traces]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    encoded = [worker.reader.encoded(worker.config.train_split, trace.row) for trace in traces]
    seen = [prompt for prompt in encoded if prompt.grid_thw is not None]
    images: dict[str, Any] = {}
    if seen:
        images = {
            "pixel_values": torch.cat([prompt.pixel_values for prompt in seen]).to(model.dtype),
            "image_grid_thw": torch.cat([prompt.grid_thw for prompt in seen]),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **images).logits.float()
    logits[..., worker.prompter.banned_token_ids()] = float("-inf")
    logprobs = (logits / worker.config.rollout.temperature).log_softmax(-1)
    out = []
    for at, trace in zip(logprobs, traces, strict=True):
        tokens = torch.from_numpy(trace.completion.astype(np.int64))
        out.append(at[trace.shared - 1 : len(trace.tokens) - 1].gather(1, tokens[:, None])[:, 0])
    return torch.cat(out).numpy()


def nudged(_module: Any, _inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
    """Embeddings moved at random by up to half of bf16's last bit, as one rounding would move them."""
    generator = torch.Generator().manual_seed(0)
    return embeddings * (1 + 2**-9 * (2 * torch.rand(embeddings.shape, generator=generator) - 1))


def load_without(worker: OneRank, layer: int) -> None:
    """Loads the engine with the policy's weights, those of one decoder layer as zeros, so that the layer
    hands on what it got."""
    call = worker.engine.call

    def losing(method: str, *args: Any) -> Any:
        if method == "update_weights":
            args = ({"weights": [lost(*entry) for entry in args[0]["weights"]]},)
        return call(method, *args)

    def lost(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        within = f".layers.{layer}." in name and "visual" not in name
        return name, torch.zeros_like(tensor) if within else tensor

    worker.engine.call = losing
    worker.sampler.load(0)
    worker.engine.call = call


def distance(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Mean and largest |difference|, nats."""
    gap = np.abs(a - b)
    return {"mean": round(float(gap.mean()), 5), "largest": round(float(gap.max()), 4)}
