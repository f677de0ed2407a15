"""Shapes of the models, and what follows from a shape alone: parameters, bytes of KV cache, FLOPs per
token."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.hardware import architectures
from trainer.hardware.layer_sizes import Experts, GatedDelta
from trainer.system.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A vision tower of Qwen2.5-VL: windows, gated MLPs, RMSNorms; of Qwen2-VL: MLPs of two matrices,
    LayerNorms; or of Qwen3-VL: these, learned positions, a bias of the patch embedding, DeepStack."""

    kind: architectures.Tower = "qwen2_5_vl"
    hidden: int = 1280
    depth: int = 32
    intermediate: int = 3420
    patch: int = 14
    merge: int = 2
    channels: int = 3
    temporal: int = 2
    heads: int = 16
    window: int = 112
    """Side of the squares within which most blocks attend, pixels."""
    full: int = 4
    """Blocks that attend to the whole image: all of them but a Qwen2.5-VL's."""
    positions: int = 0
    """Learned ones."""
    deepstack: int = 0
    """Blocks whose output a merger of its own brings to the language model."""

    @property
    def gated(self) -> bool:
        return self.kind == "qwen2_5_vl"

    @property
    def sigmoid(self) -> bool:
        """Whether its activation is x * sigmoid(1.702 x), whose gradient needs the sigmoid besides."""
        return self.kind == "qwen2_vl"

    @property
    def block_sizes(self) -> list[int]:
        """Elements of each parameter of a block: norms, qkv, attention's output and MLP, with biases."""
        h = self.hidden
        i = self.intermediate
        attention = [3 * h * h, 3 * h, h * h, h]
        if self.gated:
            return [h, h, *attention, h * i, i, h * i, i, h * i, h]
        return [h, h, h, h, *attention, h * i, i, i * h, h]

    def sizes(self, out: int) -> list[int]:
        """Elements of each parameter: patch embedding, positions, blocks, mergers to width `out`."""
        h = self.hidden
        merged = self.hidden * self.merge**2
        patches = self.channels * self.temporal * self.patch**2 * h
        merger = [merged * merged, merged, merged * out, out]
        blocks = self.block_sizes * self.depth
        if self.gated:
            return [patches, *blocks, h, *merger]
        deepstack = [merged, merged, *merger] * self.deepstack
        learned = [h, self.positions * h] if self.kind == "qwen3_vl" else []
        return [patches, *learned, *blocks, h, h, *merger, *deepstack]

    def parameters(self, out: int) -> int:
        return sum(self.sizes(out))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A language model of Qwen2.5, Qwen3, Qwen3.5 or Llama, with or without a vision tower."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    """Width of a token's MLP; with experts, of those together that compute the token."""
    vocabulary: int
    tied: bool = False
    """Output layer shares the embedding's weights."""
    head_dim: int = 128
    qkv_bias: bool = True
    """As Qwen2.5 has."""
    qk_norm: bool = False
    """Norms of each head's queries and keys, as Qwen3 has."""
    delta: GatedDelta | None = None
    """Some of the layers; attention's output in the others has a gate, which q brings."""
    experts: Experts | None = None
    """In the place of every layer's MLP."""
    vision: Vision | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - (self.delta.layers if self.delta else 0)

    @property
    def attention_linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the matrices of an attention: q, k, v and o."""
        h = self.hidden
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return [(h, q * (2 if self.delta else 1)), (h, kv), (h, kv), (q, h)]

    @property
    def rest_sizes(self) -> list[int]:
        """Elements of each parameter of any decoder layer: gated MLP or experts, and norms."""
        mlp = [self.hidden * self.intermediate] * 3
        if self.experts:
            mlp = self.experts.sizes(self.hidden, self.intermediate)
        return [*mlp, self.hidden, self.hidden]

    @property
    def layer_sizes(self) -> list[int]:
        """Elements of each parameter of a decoder layer with attention."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        sizes = [*(a * b for a, b in self.attention_linears), *self.rest_sizes]
        if self.qkv_bias:
            sizes += [q, kv, kv]
        if self.qk_norm:
            sizes += [self.head_dim] * 2
        return sizes

    @property
    def delta_sizes(self) -> list[int]:
        """Elements of each parameter of a gated delta-net layer; none without such layers."""
        return [*self.delta.sizes(self.hidden), *self.rest_sizes] if self.delta else []

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of the largest decoder layer."""
        return max(sum(self.layer_sizes), sum(self.delta_sizes))

    @cached_property
    def decoder_sizes(self) -> list[int]:
        """Elements of each parameter of all decoder layers."""
        delta = self.delta_sizes * self.delta.layers if self.delta else []
        return [*self.layer_sizes * self.attention_layers, *delta]

    def sizes(self) -> list[int]:
        """Elements of every parameter of the model."""
        head = [] if self.tied else [self.embedding_parameters]
        vision = self.vision.sizes(self.hidden) if self.vision else []
        return [self.embedding_parameters, *head, *self.decoder_sizes, self.hidden, *vision]

    @property
    def embedding_parameters(self) -> int:
        """The token embedding."""
        return self.vocabulary * self.hidden

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest single parameter: the embedding, or one that holds matrices of all experts
        of a layer."""
        return max(self.embedding_parameters, *self.rest_sizes)

    @cached_property
    def parameters(self) -> int:
        return sum(self.sizes())

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters that a text token is multiplied with: no embedding look-up, no vision tower, and of
        experts those that are chosen for it."""
        idle = self.layers * self.experts.idle(self.hidden, self.intermediate) if self.experts else 0
        return sum(self.decoder_sizes) - idle + self.embedding_parameters

    def read_parameters(self, sequences: float) -> float:
        """Parameters that a decode step of so many sequences reads, if experts are chosen evenly."""
        if self.experts is None:
            return self.matmul_parameters
        more = self.experts.idle(self.hidden, self.intermediate) * self.experts.met_by_others(sequences)
        return self.matmul_parameters + self.layers * more

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """KV cache of one token over all layers and heads."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * bytes_per_value

    def state_bytes(self, bytes_per_value: int = 2) -> int:
        """What an engine keeps of a sequence in its gated delta-net layers, however long it is."""
        return self.delta.layers * self.delta.state_bytes(bytes_per_value) if self.delta else 0

    def flops_per_token(self, context: float) -> float:
        """Forward FLOPs of one token: 2 per weight, and causal attention over an average of context / 2
        tokens."""
        attention = 4 * self.attention_layers * self.heads * self.head_dim * context / 2
        return 2 * self.matmul_parameters + attention


def _qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> Shape:
    sizes: dict[str, Any] = {"vocabulary": 152064} | more
    return Shape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, intermediate=intermediate, **sizes
    )


def _qwen3(*sizes: int, **more: Any) -> Shape:
    return _qwen2(*sizes, **{"vocabulary": 151936, "qkv_bias": False, "qk_norm": True} | more)


def _qwen3_5(*sizes: int, delta: GatedDelta, vision: Vision, **more: Any) -> Shape:
    return _qwen3(*sizes, head_dim=256, vocabulary=248320, delta=delta, vision=vision, **more)


_TOWER, _LARGE_TOWER = Vision(), Vision(intermediate=3456)
_QWEN2_VL = Vision(kind="qwen2_vl", intermediate=5120, full=32)
_QWEN3_VL = Vision(
    kind="qwen3_vl", patch=16, hidden=1024, depth=24, full=24, intermediate=4096, positions=2304, deepstack=3
)
_LARGE_QWEN3_VL = replace(_QWEN3_VL, hidden=1152, depth=27, full=27, intermediate=4304)
_QWEN3_5 = replace(_LARGE_QWEN3_VL, deepstack=0)
_SMALL_QWEN3_5 = replace(_QWEN3_5, hidden=768, depth=12, full=12, intermediate=3072, heads=12)
_30B_A3B = _qwen3(2048, 48, 32, 4, 6144, experts=Experts(count=128, active=8))
_235B_A22B = _qwen3(4096, 94, 64, 4, 12288, experts=Experts(count=128, active=8))
_MOE_OF_256 = Experts(count=256, active=8, shared=512)
# Sizes: hidden, layers, heads, key and value heads, width of the MLP.
KNOWN = {
    "Qwen/Qwen3-VL-2B-Instruct": _qwen3(2048, 28, 16, 8, 6144, tied=True, vision=_QWEN3_VL),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3(2560, 36, 32, 8, 9728, tied=True, vision=_QWEN3_VL),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3(4096, 36, 32, 8, 12288, vision=_LARGE_QWEN3_VL),
    "Qwen/Qwen3-VL-32B-Instruct": _qwen3(5120, 64, 64, 8, 25600, vision=_LARGE_QWEN3_VL),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": replace(_30B_A3B, vision=_LARGE_QWEN3_VL),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": replace(_235B_A22B, vision=_LARGE_QWEN3_VL),
    "Qwen/Qwen3-30B-A3B": _30B_A3B,
    "Qwen/Qwen3-235B-A22B": _235B_A22B,
    "Qwen/Qwen3.5-0.8B": _qwen3_5(
        1024, 24, 8, 2, 3584, tied=True, delta=GatedDelta(layers=18, value_heads=16), vision=_SMALL_QWEN3_5
    ),
    "Qwen/Qwen3.5-4B": _qwen3_5(
        2560, 32, 16, 4, 9216, tied=True, delta=GatedDelta(layers=24), vision=replace(_QWEN3_VL, deepstack=0)
    ),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 32, 16, 4, 12288, delta=GatedDelta(layers=24), vision=_QWEN3_5),
    "Qwen/Qwen3.5-27B": _qwen3_5(
        5120, 64, 24, 4, 17408, delta=GatedDelta(layers=48, value_heads=48), vision=_QWEN3_5
    ),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5(
        2048, 40, 16, 2, 9 * 512, delta=GatedDelta(layers=30), experts=_MOE_OF_256, vision=_QWEN3_5
    ),
    "Qwen/Qwen2-VL-2B-Instruct": _qwen2(
        1536, 28, 12, 2, 8960, vocabulary=151936, tied=True, vision=_QWEN2_VL
    ),
    "Qwen/Qwen2-VL-7B-Instruct": _qwen2(3584, 28, 28, 4, 18944, vision=_QWEN2_VL),
    "Qwen/Qwen2-VL-72B-Instruct": _qwen2(8192, 80, 64, 8, 29568, vision=_QWEN2_VL),
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2(
        2048, 36, 16, 2, 11008, vocabulary=151936, tied=True, vision=_TOWER
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2(3584, 28, 28, 4, 18944, vision=_TOWER),
    "Qwen/Qwen2.5-VL-32B-Instruct": _qwen2(5120, 64, 40, 8, 27648, vision=_LARGE_TOWER),
    "Qwen/Qwen2.5-VL-72B-Instruct": _qwen2(8192, 80, 64, 8, 29568, vision=_LARGE_TOWER),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(896, 24, 14, 2, 4864, vocabulary=151936, head_dim=64, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2(5120, 48, 40, 8, 13824),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2(8192, 80, 64, 8, 29568),
}
"""From the models' published config.json."""


def shape_of(path: str, revision: str = "") -> Shape | None:
    """The shape of a model: from the table, a local folder or the hub's cache; None for a folder that is not
    there yet.

    Raises ConfigError for a hub model that none of them has, or of an architecture that is not supported.
    """
    if path in KNOWN:
        return KNOWN[path]
    architectures.check_path(path)
    if config := config_file(path, revision):
        return from_config_of(path, json.loads(config.read_text()))
    if not is_hub_id(path):
        return None
    raise ConfigError(
        f"the shape of {path} is not known here: download it and set model.path to its directory, or use"
        " one of " + ", ".join(KNOWN)
    )


def has_known_shape(path: str, revision: str = "") -> bool:
    """Whether `shape_of` finds a model on this machine."""
    return path in KNOWN or config_file(path, revision) is not None


def known_as(path: str) -> str:
    """The hub id in the table whose shape a model has, as what was trained from it does; "" where there is
    none."""
    shape = shape_of(path) if has_known_shape(path) else None
    return path if path in KNOWN else next((name for name, known in KNOWN.items() if known == shape), "")


def is_hub_id(path: str) -> bool:
    """Whether a path names a model on the hub (OWNER/NAME), and no folder."""
    return "${" not in path and not path.startswith(("/", ".", "~")) and not Path(path).is_dir()


def config_file(path: str, revision: str = "") -> Path | None:
    """config.json in a local folder, or of a hub id in the hub's cache, found as huggingface_hub does."""
    local = Path(path) / "config.json"
    if local.is_file() or not is_hub_id(path):
        return local if local.is_file() else None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}"
    named = model / "refs" / (revision or "main")
    commit = named.read_text().strip() if named.is_file() else revision
    cached = model / "snapshots" / commit / "config.json"
    return cached if commit and cached.is_file() else None


def from_config_of(path: str, config: dict[str, Any]) -> Shape:
    """`from_config` of a named model. Raises ConfigError for another architecture or a missing key."""
    architectures.check_architecture(path, config)
    try:
        return from_config(config)
    except KeyError as error:
        raise ConfigError(f"model.path {path}: its config.json has no {error.args[0]}") from None


def from_config(config: dict[str, Any]) -> Shape:
    """The shape in a Hugging Face config.json of a supported model, the text model's keys nested or at the
    top."""
    text = config.get("text_config") or config
    vision = config.get("vision_config")
    kind = config.get("model_type", "")
    family = architectures.FAMILIES.get(kind) or architectures.FAMILIES["qwen2_5_vl"]
    experts = Experts.of(text) if family.experts else None
    if experts:
        width = experts.active * text["moe_intermediate_size"] + experts.shared
    else:
        width = text["intermediate_size"]
    return Shape(
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        intermediate=width,
        vocabulary=text["vocab_size"],
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        qkv_bias=family.qkv_bias or (kind == "llama" and bool(text.get("attention_bias"))),
        qk_norm=family.qk_norm,
        delta=GatedDelta.of(text, family.fused_delta) if family.gated_delta else None,
        experts=experts,
        vision=_vision(vision, family.tower or "qwen2_5_vl") if vision else None,
    )


def _vision(vision: dict[str, Any], kind: architectures.Tower) -> Vision:
    """A Qwen2-VL's `hidden_size` is the language model's; its MLPs are `mlp_ratio` times its own width."""
    qwen3 = kind == "qwen3_vl"
    depth = vision["depth"]
    hidden = vision["embed_dim" if kind == "qwen2_vl" else "hidden_size"]
    windowed = len(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
    return Vision(
        kind=kind,
        hidden=hidden,
        depth=depth,
        intermediate=hidden * vision["mlp_ratio"] if kind == "qwen2_vl" else vision["intermediate_size"],
        patch=vision.get("patch_size", 16 if qwen3 else 14),
        merge=vision.get("spatial_merge_size", 2),
        channels=vision.get("in_channels") or vision.get("in_chans") or 3,
        temporal=vision.get("temporal_patch_size", 2),
        heads=vision.get("num_heads", 16),
        window=vision.get("window_size", 112),
        full=windowed if kind == "qwen2_5_vl" else depth,
        positions=vision.get("num_position_embeddings", 2304 if qwen3 else 0),
        deepstack=len(vision.get("deepstack_visual_indexes", ())),
    )
