"""Builds small models with random weights: the real transformers classes, a byte-level BPE tokenizer of our
own with Qwen's special tokens, the real processor and a chat template of the same form.

transformers and vLLM load the result like any other model directory. The Qwen2.5-VL is what the demo trains;
tests and benchmarks run on every family that is supported. Nothing of it is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from examples.demo.shapes import corpus
from trainer.data.schema import SYSTEM_PROMPT
from trainer.hardware.architectures import FAMILIES
from trainer.storage.expert_files import written_tensors

Size = Literal["tiny", "medium"]
Family = Literal[
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen3_vl_moe",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
]
"""`model_type` of config.json."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
                  "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
                  "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
"""In the order of their ids in the published tokenizer; here too they follow the byte-pair vocabulary."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""The chat format of Qwen2.5-VL: a default system prompt, images where they stand in the content."""


@dataclass(frozen=True)
class TinyShape:
    """Sizes of one model. Head dimensions are 32 throughout: the smallest that vLLM's CPU attention takes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vision_hidden: int
    vision_intermediate: int
    vision_depth: int
    tie_embeddings: bool
    """Like Qwen2.5-VL-3B (true) or 7B and larger (false)."""


SHAPES: dict[str, TinyShape] = {
    "tiny": TinyShape(128, 256, 2, 4, 2, 128, 256, 2, True),
    "medium": TinyShape(512, 1536, 12, 16, 4, 256, 768, 6, False),
}

MERGES = 512
"""Byte pairs that the tokenizer may learn, at most."""
HEAD = 32
EXPERTS, ACTIVE = 8, 2
"""Experts of a layer, in families that have them, each as wide as an MLP; those that compute a token."""


def build_tokenizer(sentences: Sequence[str] = (), merges: int = 0) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer trained on these sentences, by default those of `shapes`: any text can be
    encoded, ours in few tokens. merges: 0 stands for `MERGES`."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + (merges or MERGES),
        min_frequency=1,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(
        [SYSTEM_PROMPT, "You are a helpful assistant. system user", *(sentences or corpus())], trainer
    )
    bpe = json.loads(trained.to_str())["model"]
    vocabulary = bpe["vocab"] | {token: len(bpe["vocab"]) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(pair) for pair in bpe["merges"]],  # ty: ignore[invalid-argument-type]
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,  # ty: ignore[invalid-argument-type]
        extra_special_tokens=SPECIAL_TOKENS,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """Ids of the special tokens."""
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL_TOKENS}


def build_config(
    shape: TinyShape, tokenizer: Qwen2Tokenizer, family: Family = "qwen2_5_vl"
) -> PreTrainedConfig:
    """The configuration of a model of this shape. Its vocabulary is padded to a multiple of 64, as the real
    one is.

    Weights start at 1/sqrt(width): the usual 0.02 is meant for widths of thousands, and learns nothing here
    for long.
    """
    ids = token_ids(tokenizer)
    pad = ids["<|endoftext|>"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    text: dict[str, Any] = {
        "vocab_size": (len(tokenizer) // 64 + 1) * 64,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "initializer_range": shape.hidden**-0.5,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": rope,
        "dtype": "float32",
        "bos_token_id": pad,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": pad,
    }
    vision = {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_hidden // HEAD,
        "out_hidden_size": shape.hidden,
        "initializer_range": shape.vision_hidden**-0.5,
    }
    both: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": shape.tie_embeddings,
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
    }
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
    }
    match family:
        case "qwen2_5_vl":
            rope["mrope_section"] = [4, 6, 6]
            vision["fullatt_block_indexes"] = [shape.vision_depth - 1]
            return Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"], **both)
        case "qwen2_vl":
            rope["mrope_section"] = [4, 6, 6]
            width = vision.pop("hidden_size")
            del vision["out_hidden_size"], vision["intermediate_size"]
            vision |= {"embed_dim": width, "mlp_ratio": 2, "hidden_size": shape.hidden}
            return Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"], **both)
        case "qwen3_vl" | "qwen3_vl_moe":
            rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
            text["head_dim"] = HEAD
            vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
            if family == "qwen3_vl":
                return Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"], **both)
            text |= experts
            return Qwen3VLMoeConfig(architectures=["Qwen3VLMoeForConditionalGeneration"], **both)
        case "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" | "qwen3_next":
            # The last layer of each four has attention, of two the second. Heads of the others are 128 wide,
            # as published: vLLM's kernels for CPUs take no other.
            rope["partial_rotary_factor"] = 0.25
            if family != "qwen3_next":
                rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
            every = min(4, shape.layers)
            text |= {
                "head_dim": HEAD,
                "layer_types": [
                    "linear_attention" if (i + 1) % every else "full_attention" for i in range(shape.layers)
                ],
                "linear_num_key_heads": shape.kv_heads,
                "linear_num_value_heads": shape.heads,
            }
            vision |= {"patch_size": 16, "num_position_embeddings": 64}
            if family == "qwen3_5":
                return Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"], **both)
            if family == "qwen3_5_text":
                return Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], **text)
            text |= experts | {"shared_expert_intermediate_size": shape.intermediate // 2}
            if family == "qwen3_next":
                text["tie_word_embeddings"] = False  # vLLM's has a head of its own, as published
                return Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], **text)
            # These have no width of an MLP, and their experts' shares always sum to 1.
            del text["intermediate_size"], text["norm_topk_prob"]
            if family == "qwen3_5_moe_text":
                return Qwen3_5MoeTextConfig(architectures=["Qwen3_5MoeForCausalLM"], **text)
            return Qwen3_5MoeConfig(architectures=["Qwen3_5MoeForConditionalGeneration"], **both)
        case "qwen2":
            return Qwen2Config(architectures=["Qwen2ForCausalLM"], **text)
        case "qwen3":
            return Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=HEAD, **text)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                architectures=["Qwen3MoeForCausalLM"], **text, **experts | {"head_dim": HEAD}
            )
        case "llama":  # frequencies as in Llama 3.1
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 512}  # fmt: skip
            return LlamaConfig(architectures=["LlamaForCausalLM"], head_dim=HEAD, **text)


def build_processor(tokenizer: Qwen2Tokenizer, family: Family) -> Any:
    """What turns a chat into the model's inputs; of a text model its tokenizer."""
    match family:
        case "qwen2_5_vl":
            return Qwen2_5_VLProcessor(
                image_processor=Qwen2VLImageProcessor(),
                tokenizer=tokenizer,
                video_processor=Qwen2VLVideoProcessor(),
                chat_template=CHAT_TEMPLATE,
            )
        case "qwen2_vl":
            return Qwen2VLProcessor(
                image_processor=Qwen2VLImageProcessor(),
                tokenizer=tokenizer,
                video_processor=Qwen2VLVideoProcessor(),
                chat_template=CHAT_TEMPLATE,
            )
        case "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            half = [0.5, 0.5, 0.5]
            return Qwen3VLProcessor(
                image_processor=Qwen2VLImageProcessor(patch_size=16, image_mean=half, image_std=half),
                tokenizer=tokenizer,
                video_processor=Qwen3VLVideoProcessor(),
                chat_template=CHAT_TEMPLATE,
            )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def publish(model: Any, file: Path, family: Family) -> None:
    """Lays experts out as published files do, which transformers does not."""
    layout = FAMILIES[family].experts
    if not layout:
        return
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        for key, size, read in written_tensors(
            name, tuple(parameter.shape), lambda a, b, of=values: of[a:b], layout
        ):
            tensors[key] = read(0, torch.Size(size).numel()).view(size).clone()
    save_file(tensors, file, {"format": "pt"})


def build(
    out_dir: str | Path,
    seed: int = 0,
    size: Size = "tiny",
    family: Family = "qwen2_5_vl",
    tokenizer: Qwen2Tokenizer | None = None,
) -> Path:
    """Writes a model directory (safetensors in fp32, configuration, tokenizer, processor, chat template).

    The weights follow from the seed alone; the tokenizer is by default that of `shapes`. The directory
    appears complete or not at all; one that is there is replaced.
    """
    out = Path(out_dir)
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    tokenizer = tokenizer or build_tokenizer()
    config = build_config(SHAPES[size], tokenizer, family)
    loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = loader.from_config(config)
        for name, parameter in model.named_parameters():
            # transformers starts with decays that forget a token at once; these last for 1 to 100 tokens
            if name.endswith("A_log"):
                parameter.data.uniform_(0.01, 1.0).log_()
    ids = token_ids(tokenizer)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=True,
    )
    model.save_pretrained(staging)
    publish(model, staging / "model.safetensors", family)
    build_processor(tokenizer, family).save_pretrained(staging)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(staging, out)
    return out
