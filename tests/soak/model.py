"""A model as deep as a real one, narrow, with as large a vocabulary as a test needs."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.demo import tiny_model
from tests.families import loader

WIDTH, VISION_DEPTH = 64, 4


def build(
    out: Path, layers: int, vocabulary: int, positions: int = 8192, family: tiny_model.Family = "qwen2_5_vl"
) -> Path:
    """Writes the model: 28 layers are those of 7B, 36 of 3B. A vocabulary above the tokenizer's is padding,
    which is never sampled; it decides how many tokens make a chunk of logits."""
    shape = tiny_model.TinyShape(WIDTH, 2 * WIDTH, layers, 2, 1, WIDTH, 2 * WIDTH, VISION_DEPTH, False)
    tiny_model.SHAPES["soak"] = shape
    tiny_model.build(out, 0, "soak", family)  # ty: ignore[invalid-argument-type]
    model = loader(family).from_pretrained(out, dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    model.config.text_config.max_position_embeddings = positions
    model.save_pretrained(out)
    tiny_model.publish(out / "model.safetensors", family)
    return out
