"""Configurations of transformers' models at the recipes' true shapes."""

from __future__ import annotations

from typing import Any

import torch
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

from trainer.hardware.model_shapes import GatedDelta, Shape, Vision

IMAGE = 151655
"""Image token of Qwen2.5-VL and Qwen3-VL; a Qwen3.5 here takes the same."""
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
