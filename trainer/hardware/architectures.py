"""Which families of models are trained, and what distinguishes them. Any other is refused by name: it may
load and train and still be computed wrongly. docs/adding-an-architecture.md says what a new row of `FAMILIES`
takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.system.errors import ConfigError

Tower = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
"""Kind of a vision tower."""


@dataclass(frozen=True)
class Architecture:
    """What distinguishes a family of models from the others; its sizes are in its config.json."""

    title: str
    blocks: tuple[str, ...]
    """transformers' classes of its decoder's layers and of its tower's blocks: ZeRO-3 gathers each whole, and
    the backward pass recomputes each whole."""
    tower: Tower | Literal[""] = ""
    """Its vision tower's; "": it reads text only."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as Qwen2.5's; Llama's config.json says it."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalized, as Qwen3's."""
    gated_delta: bool = False
    """Whether most of its layers are gated delta-net layers and the others' outputs are gated, as
    Qwen3.5's."""
    fused_delta: bool = False
    """Whether these layers have two matrices for their inputs and gates instead of four, as Qwen3-Next's."""
    experts: Literal["", "apart", "together", "transposed"] = ""
    """How published files hold the weights of experts: each matrix of each expert apart; those of a layer
    together, as transformers has them, outputs before inputs; or together with inputs before outputs. "": its
    layers have an MLP and no experts."""
    shared_expert: bool = False
    """Whether one expert more, with a gate of its own, computes every token, as Qwen3.5's. Where config.json
    has no `norm_topk_prob`, the chosen experts' shares sum to 1."""


_QWEN3_5: dict[str, Any] = {"qk_norm": True, "gated_delta": True}
_MOE: dict[str, Any] = {"experts": "together", "shared_expert": True}
FAMILIES = {
    "qwen2_5_vl": Architecture("Qwen2.5-VL", ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
                               tower="qwen2_5_vl", qkv_bias=True),
    "qwen2_vl": Architecture("Qwen2-VL", ("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"),
                             tower="qwen2_vl", qkv_bias=True),
    "qwen3_vl": Architecture("Qwen3-VL", ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
                             tower="qwen3_vl", qk_norm=True),
    "qwen3_5": Architecture("Qwen3.5", ("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"),
                            tower="qwen3_vl", **_QWEN3_5),
    "qwen3_5_moe": Architecture("Qwen3.5-MoE", ("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"),
                                tower="qwen3_vl", **_QWEN3_5, **_MOE),
    "qwen3_vl_moe": Architecture("Qwen3-VL-MoE", ("Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock"),
                                 tower="qwen3_vl", qk_norm=True, experts="transposed"),
    "qwen3_5_text": Architecture("Qwen3.5 (text)", ("Qwen3_5DecoderLayer",), **_QWEN3_5),
    "qwen3_5_moe_text": Architecture("Qwen3.5-MoE (text)", ("Qwen3_5MoeDecoderLayer",), **_QWEN3_5, **_MOE),
    "qwen3_next": Architecture("Qwen3-Next (text)", ("Qwen3NextDecoderLayer",), fused_delta=True,
                               experts="apart", shared_expert=True, **_QWEN3_5),
    "qwen2": Architecture("Qwen2 and Qwen2.5 (text)", ("Qwen2DecoderLayer",), qkv_bias=True),
    "qwen3": Architecture("Qwen3 (text)", ("Qwen3DecoderLayer",), qk_norm=True),
    "qwen3_moe": Architecture("Qwen3-MoE (text)", ("Qwen3MoeDecoderLayer",), qk_norm=True, experts="apart"),
    "llama": Architecture("Llama (text)", ("LlamaDecoderLayer",)),
}  # fmt: skip
"""What is trained, by `model_type` of config.json. The parity tests run on every family of this table
(tests/families.py)."""
MISSING = {
    "qwen2_5_omni": "its audio tower is not fed, and there is no parity test",
    "internvl": "its images are tiles without positions of rows and columns, and there is no parity test",
    "gemma3": "packed rows have neither its sliding windows nor image tokens that see each other",
}
"""What is known to be lacking; any other architecture has just not been tested."""
CONVERT = (
    "make a model folder of it with `python -m examples.pretrained.smollm2 --gguf FILE.gguf --out FOLDER`,"
    " and set model.path to the folder"
)
"""How a GGUF file becomes a model that is trained."""


def check_architecture(path: str, config: dict[str, Any]) -> None:
    """Raises ConfigError if the architecture in a Hugging Face config.json is not among `FAMILIES`."""
    kind = str(config.get("model_type", ""))
    if (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        raise ConfigError(
            f"model.path {path}: config.json says GGUF, which is read and not trained: {CONVERT}; if the"
            " weights beside it are plain already, take quantization_config out of config.json"
        )
    if kind and kind not in FAMILIES:
        _refuse(path, kind)
    text = config.get("text_config") or config
    if kind in FAMILIES and FAMILIES[kind].experts:
        _check_experts(path, FAMILIES[kind], text)
    if text.get("use_sliding_window"):
        raise ConfigError(
            f"model.path {path}: layers with sliding windows are not supported; use a model without"
        )


def check_path(path: str) -> None:
    """The same for a local folder that has a config.json, or by name for a hub id such as
    `Qwen/Qwen3.5-9B`; a GGUF file is refused."""
    file = Path(path) / "config.json"
    if path.endswith(".gguf") or (not file.is_file() and any(Path(path).glob("*.gguf"))):
        raise ConfigError(f"model.path {path} is a GGUF file: {CONVERT}")
    if file.is_file():
        return check_architecture(path, json.loads(file.read_text()))
    name = path.rpartition("/")[2].lower().replace("-", "_").replace(".", "_")
    for kind in sorted(MISSING, key=len, reverse=True):
        if name.replace("_", "").startswith(kind.replace("_", "")):
            _refuse(path, kind)


def _check_experts(path: str, family: Architecture, text: dict[str, Any]) -> None:
    """Raises ConfigError for a mixture of experts that the tests do not cover."""
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"model.path {path}: layers without experts among layers with them have no parity test; use a"
            " model whose layers all have experts"
        )
    if not text.get("norm_topk_prob", family.shared_expert):
        raise ConfigError(
            f"model.path {path}: shares of experts that do not sum to 1 (norm_topk_prob false) have no parity"
            " test; use a model with norm_topk_prob true"
        )
    if text["hidden_size"] in (text["moe_intermediate_size"], 2 * text["moe_intermediate_size"]):
        raise ConfigError(
            f"model.path {path}: matrices of experts are square (hidden_size, moe_intermediate_size), so that"
            " transformers cannot tell which way they lie in a file; use other widths"
        )


def _refuse(path: str, kind: str) -> None:
    why = MISSING.get(kind, "it has no parity test")
    raise ConfigError(f"model.path {path}: {kind} is not supported ({why}); use one of {family_titles()}")


def family_titles() -> str:
    """All families that are trained, for a message."""
    return ", ".join(family.title for family in FAMILIES.values())
