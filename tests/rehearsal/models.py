"""transformers' models at the recipes' true shapes, of tensors that hold nothing, as the trainer makes
them."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.initialization import no_init_weights

from trainer.config import RunConfig
from trainer.hardware.model_shapes import GatedDelta, Shape, Vision
from trainer.learning import blocks, logprobs, lora
from trainer.learning.zero.setup import exact_frequencies

IMAGE = 151655
"""Image token of Qwen2.5-VL and Qwen3-VL; a Qwen3.5 here takes the same."""
BLOCK, SCALES = 64, 256
"""Weights in 4 bits that share a scale, and scales that share one of theirs: bitsandbytes' own numbers."""
VOCABULARY = 151665
"""Token ids from here on are banned: they are no tokens."""


def model_class(shape: Shape) -> Any:
    """transformers' class for models of this kind."""
    if shape.vision is None:
        return Qwen2ForCausalLM
    if shape.delta:
        return Qwen3_5MoeForConditionalGeneration if shape.experts else Qwen3_5ForConditionalGeneration
    if shape.experts:
        return Qwen3VLMoeForConditionalGeneration
    return Qwen2_5_VLForConditionalGeneration if shape.vision.gated else Qwen3VLForConditionalGeneration


def model_config(shape: Shape) -> PreTrainedConfig:
    """transformers' configuration of a Qwen2.5, Qwen2.5-VL, Qwen3-VL or Qwen3.5 of this shape, the latter two
    with experts or without."""
    if shape.vision is None:
        config: PreTrainedConfig = Qwen2Config(**_text(shape), rope_parameters=_rope({}))
    elif shape.vision.gated:
        config = Qwen2_5_VLConfig(
            text_config=_text(shape) | {"rope_parameters": _rope({"mrope_section": [16, 24, 24]})},
            vision_config=_tower(shape, shape.vision),
            tie_word_embeddings=shape.tied,
            image_token_id=IMAGE,
        )
    elif shape.delta:
        kind: Any = Qwen3_5MoeConfig if shape.experts else Qwen3_5Config
        config = kind(
            text_config=_text(shape) | _gated_delta(shape, shape.delta),
            vision_config=_tower(shape, shape.vision),
            tie_word_embeddings=shape.tied,
            image_token_id=IMAGE,
        )
    else:
        sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
        text = _text(shape) | {"head_dim": shape.head_dim, "rope_parameters": _rope(sections)}
        if shape.experts:
            text["norm_topk_prob"] = True
        kind = Qwen3VLMoeConfig if shape.experts else Qwen3VLConfig
        config = kind(
            text_config=text,
            vision_config=_tower(shape, shape.vision),
            tie_word_embeddings=shape.tied,
            image_token_id=IMAGE,
        )
    config._attn_implementation = "sdpa"
    config.dtype = torch.bfloat16
    return config


def _text(shape: Shape) -> dict[str, Any]:
    return mlp(shape) | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "layer_types": ["full_attention"] * shape.layers,
    }


def mlp(shape: Shape) -> dict[str, int]:
    """Sizes of a layer's MLP or experts, as config.json has them."""
    if (experts := shape.experts) is None:
        return {"intermediate_size": shape.intermediate}
    sizes = {
        "moe_intermediate_size": experts.width(shape.intermediate),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
    }
    return sizes | ({"shared_expert_intermediate_size": experts.shared} if experts.shared else {})


def _gated_delta(shape: Shape, delta: GatedDelta) -> dict[str, Any]:
    """Every fourth layer has attention; a quarter of its heads' width is rotated."""
    turned = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(shape.layers)]
    assert kinds.count("linear_attention") == delta.layers
    return {
        "head_dim": shape.head_dim,
        "rope_parameters": _rope(turned),
        "layer_types": kinds,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.kernel,
    }


def _rope(more: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6} | more


def _tower(shape: Shape, vision: Vision) -> dict[str, Any]:
    tower: dict[str, Any] = {
        "depth": vision.depth,
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "num_heads": vision.heads,
        "patch_size": vision.patch,
        "out_hidden_size": shape.hidden,
    }
    if vision.gated:
        return tower | {"fullatt_block_indexes": [7, 15, 23, 31]}
    tower |= {"num_position_embeddings": vision.positions}
    if not vision.deepstack:
        return tower
    every = vision.depth // (vision.deepstack + 1)
    return tower | {
        "deepstack_visual_indexes": [every * (number + 1) - 1 for number in range(vision.deepstack)]
    }


def put_into_4_bits(hf: Any, quantization: dict[str, Any], device: str) -> None:
    """Makes the decoder's linear layers bitsandbytes' own, whose weights are packed in 4 bits, with scales in
    8 bits. transformers would quantize real weights."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    hf.is_loaded_in_4bit = True
    skipped = [re.compile(pattern) for pattern in quantization["llm_int8_skip_modules"]]
    for name, module in hf.named_modules():
        if not isinstance(module, nn.Linear) or any(pattern.match(name) for pattern in skipped):
            continue
        numbers = module.weight.numel()
        scales = -(-numbers // BLOCK)
        packed: Any = nn.Parameter(
            torch.empty(numbers // 2, 1, dtype=torch.uint8, device=device), requires_grad=False
        )
        packed.quant_state = QuantState(
            absmax=torch.empty(scales, dtype=torch.uint8, device=device),
            shape=module.weight.shape,
            code=torch.empty(16, dtype=torch.float32, device=device),
            blocksize=BLOCK,
            quant_type=quantization["bnb_4bit_quant_type"],
            dtype=module.weight.dtype,
            offset=torch.empty((), dtype=torch.float32, device=device),
            state2=QuantState(
                absmax=torch.empty(-(-scales // SCALES), dtype=torch.float32, device=device),
                code=torch.empty(256, dtype=torch.float32, device=device),
                blocksize=SCALES,
                dtype=torch.float32,
            ),
        )
        packed.quant_type, packed.compress_statistics = packed.quant_state.quant_type, True
        made: Any = module
        made.compute_dtype, made.compute_type_is_set = module.weight.dtype, True
        made.support_avx512bf16_for_cpu = False
        made.weight = packed
        made.__class__ = bnb.nn.Linear4bit


@contextmanager
def nothing_moves() -> Generator[None]:
    """Modules stay where they were made: adapters are made where they belong, and fake tensors do not know
    how a module moves."""
    module: Any = nn.Module
    to = module.to
    module.to = lambda self, *_, **__: self
    try:
        yield
    finally:
        module.to = to


def build(config: RunConfig, shape: Shape, fake: FakeTensorMode, device: str) -> tuple[Any, Any]:
    """transformers' model and the trainer's around it, of fake tensors on `device`."""
    torch.set_default_dtype(torch.bfloat16)
    with fake, no_init_weights(), torch.device(device):
        hf: Any = model_class(shape)(model_config(shape))
    with fake, torch.device(device):
        if config.lora.qlora:
            put_into_4_bits(hf, config.lora.quantization(config.model.dtype), device)
        if config.lora.rank:
            with nothing_moves():
                lora.inject_adapters(hf, config.lora, 0)
    torch.set_default_dtype(torch.float32)
    with fake:
        if shape.tied:
            hf.tie_weights()
        exact_frequencies(hf)
        if config.model.gradient_checkpointing:
            blocks.recompute(blocks.blocks_of(hf), random=False)
        banned = list(range(VOCABULARY, shape.vocabulary))
        temperature = config.rollout.temperature if config.method == "grpo" else 1.0
        model = logprobs.LogprobModel(hf, banned, temperature, not config.tower_trained).train()
        if config.model.freeze_vision and model.has_vision:
            hf.model.visual.requires_grad_(False)
        for module in model.modules():  # as `.to(device)` does
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    return hf, model
