"""Low-rank adapters: which layers get one, how it is scaled, and the description that peft and vLLM read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainer.config.ranges import ranged_field

ADAPTER = "default"
"""peft's name for the only adapter, in the names of its parameters; adapter files leave it out."""
TEXT = (
    r"(?:.*\.)?layers\.\d+\.(?:(?:self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj"
    r"|linear_attn\.(?:in_proj_(?:qkvz?|z|ba?|a)|out_proj))"
)
TOWER = (
    r"(?:.*\.)?visual\.blocks\.\d+\."
    r"(?:attn\.(?:qkv|proj)|mlp\.(?:gate_proj|up_proj|down_proj|(?:linear_)?fc[12]))"
)
"""Names of the linear layers of Qwen's decoder layers, and of its vision tower's blocks; peft matches them
whole."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters (arXiv 2106.09685): W + scale B A, of which B and A are trained. Advice:
    docs/lora.md."""

    rank: int = ranged_field(0, least=0, most=1024)
    """Rows of A and columns of B; 0: no adapter, all weights are trained."""
    alpha: int = ranged_field(32, least=1)
    """scale = alpha / rank, or alpha / sqrt(rank) with rslora."""
    rslora: bool = False
    """Rank-stabilized scale (arXiv 2312.03732)."""
    dropout: float = ranged_field(0.0, least=0, below=1)
    """Dropout of the adapters' inputs; method sft only."""
    vision: bool = False
    """Adapters in the vision tower's blocks too; without them the tower stays as it is."""
    qlora: bool = False
    """The decoder layers' weights in 4 bits (NF4 with double quantization, arXiv 2305.14314), for 0.52 bytes
    instead of 2; method sft only. An adapter is merged into what the 4 bits stand for, not into the weights
    they are made from."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def quantization(self, dtype: str) -> dict[str, Any]:
        """Arguments of `transformers.BitsAndBytesConfig` for a run that computes in `dtype`, bf16 or fp32."""
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype],
            "llm_int8_skip_modules": [r"(?:.*\.)?visual", "lm_head"],
        }

    def peft(self) -> dict[str, Any]:
        """Arguments of `peft.LoraConfig`; with `peft_type` the content of adapter_config.json."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": f"{TEXT}|{TOWER}" if self.vision else TEXT,
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
