"""Makes a model of 3B's shape on the GPU, where random weights take a second: `python -m
tests.gpu.three_billion TINY OUT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoProcessor, Qwen2_5_VLForConditionalGeneration

THREE_B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
"""Qwen2.5-VL-3B's text model, from its published configuration."""


def make(tiny: Path, out: Path, device: str) -> None:
    """Saves it in bf16, with the tokenizer and the tower of a tiny model; `out` appears when it is whole."""
    shape = AutoConfig.from_pretrained(tiny)
    for key, value in THREE_B.items():
        setattr(shape.text_config, key, value)
    shape.text_config.layer_types = ["full_attention"] * shape.text_config.num_hidden_layers
    shape.vision_config.out_hidden_size = shape.text_config.hidden_size
    shape.dtype = "bfloat16"
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(shape).to(torch.bfloat16)
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    AutoProcessor.from_pretrained(tiny).save_pretrained(partial)
    os.replace(partial, out)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), "cuda")
