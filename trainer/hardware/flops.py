"""FLOPs of Qwen2.5 and Qwen2.5-VL per phase, and what share of the GPUs' peak that is. Pure arithmetic, no torch.

Counted are matrix multiplications (2 FLOPs per multiply-add) with causal attention, as in PaLM's appendix B (arXiv
2204.02311) less the half of the attention that a causal kernel skips. Not counted: norms, activations, softmax, rotary
embeddings, the embedding look-up, the optimizer, and padding. So these are the model's FLOPs: time spent on anything
else lowers the utilisation (MFU). HFU adds the forward pass that gradient checkpointing repeats (arXiv 2205.05198).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Grid = tuple[int, int, int]
"""grid_thw of one picture: temporal, vertical and horizontal patches."""


@dataclass(frozen=True)
class Vision:
    """The vision tower."""

    depth: int
    hidden: int
    intermediate: int
    out: int
    """Width of the language model that it feeds."""
    patch: int = 14
    temporal_patch: int = 2
    channels: int = 3
    merge: int = 2
    """Patches per side that become one image token."""
    window: int = 112
    """Side of an attention window, pixels."""
    full_blocks: int = 4
    """Blocks whose attention sees the whole picture."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides its FLOPs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    vision: Vision | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the content of a Hugging Face config.json, with the language model's keys nested or at the top."""
        text = config.get("text_config") or config
        tower = config.get("vision_config")
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        return cls(
            layers=text["num_hidden_layers"],
            hidden=hidden,
            intermediate=text["intermediate_size"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            vocab=text["vocab_size"],
            vision=tower
            and Vision(
                depth=tower["depth"],
                hidden=tower["hidden_size"],
                intermediate=tower["intermediate_size"],
                out=tower.get("out_hidden_size", hidden),
                patch=tower.get("patch_size", 14),
                temporal_patch=tower.get("temporal_patch_size", 2),
                channels=tower.get("in_channels") or tower.get("in_chans") or 3,
                merge=tower.get("spatial_merge_size", 2),
                window=tower.get("window_size", 112),
                full_blocks=len(tower.get("fullatt_block_indexes", (7, 15, 23, 31))),
            ),
        )

    @classmethod
    def load(cls, model_dir: str | Path) -> Shape:
        """Of a model directory."""
        return cls.of(json.loads((Path(model_dir) / "config.json").read_text()))


@dataclass(frozen=True)
class Answered:
    """One prompt with one answer."""

    prompt: int
    """Tokens, image tokens included."""
    answer: int
    """Tokens."""
    grids: tuple[Grid, ...] = ()
    """Of its pictures."""
    group: int = 0
    """Samples of one group share the prompt."""


# --- forward passes ---------------------------------------------------------------------------------------------------


def layer_flops_per_token(s: Shape) -> int:
    """Projections and MLP of one decoder layer: q, k, v, o and the three matrices of the gated MLP."""
    attention = 2 * s.hidden * s.heads * s.head_dim + 2 * s.hidden * s.kv_heads * s.head_dim
    return 2 * (attention + 3 * s.hidden * s.intermediate)


def attention_flops(s: Shape, first: int, last: int) -> int:
    """Scores and weighted values of all layers for the tokens at positions first..last, counted from 1.

    The token at position t sees t keys: 2 products x 2 FLOPs x heads x head_dim x t.
    """
    keys = last * (last + 1) // 2 - first * (first - 1) // 2 if last >= first else 0
    return 4 * s.layers * s.heads * s.head_dim * keys


def head_flops(s: Shape, tokens: int) -> int:
    """Logits of `tokens` tokens."""
    return 2 * s.hidden * s.vocab * tokens


def language_flops(s: Shape, tokens: int) -> int:
    """Forward pass of the decoder layers over one sequence, without logits."""
    return tokens * s.layers * layer_flops_per_token(s) + attention_flops(s, 1, tokens)


def vision_flops(s: Shape, grids: Iterable[Grid]) -> int:
    """Forward pass of the vision tower.

    Per patch: the embedding, and in every block qkv, the output projection and a gated MLP. Attention is not causal:
    all patches of a frame in `full_blocks`, in the others a window of window / patch per side, smaller at the edges.
    The merger maps merge^2 patches together through two matrices.
    """
    v = s.vision
    if v is None:
        return 0
    total = 0
    for frames, height, width in grids:
        patches = frames * height * width
        embed = 2 * v.channels * v.temporal_patch * v.patch**2 * v.hidden
        block = 2 * (4 * v.hidden**2 + 3 * v.hidden * v.intermediate)
        total += patches * (embed + v.depth * block)
        side = v.window // v.patch // v.merge * v.merge
        windows = _squares(height, side) * _squares(width, side)
        seen = v.full_blocks * (height * width) ** 2 + (v.depth - v.full_blocks) * windows
        total += 4 * v.hidden * frames * seen
        merged = v.hidden * v.merge**2
        total += patches // v.merge**2 * 2 * merged * (merged + v.out)
    return total


def _squares(length: int, side: int) -> int:
    """Sum of the squares of the pieces of `length` cut every `side`."""
    return length // side * side**2 + (length % side) ** 2


# --- phases -----------------------------------------------------------------------------------------------------------


def prefill_flops(s: Shape, prompt: int, grids: Iterable[Grid] = ()) -> int:
    """Reads a prompt; logits of its last token, which give the first token of the answer."""
    return vision_flops(s, grids) + language_flops(s, prompt) + head_flops(s, 1)


def decode_flops(s: Shape, prompt: int, answer: int) -> int:
    """Writes an answer, token by token: the first came with the prefill, the last is never read."""
    steps = max(answer - 1, 0)
    linear = steps * s.layers * layer_flops_per_token(s)
    return linear + attention_flops(s, prompt + 1, prompt + steps) + head_flops(s, steps)


def rollout_flops(s: Shape, sequences: Sequence[Answered], shared_prompts: bool) -> int:
    """Generation. shared_prompts: a group's prompt is read once (prefix caching), not once per sample."""
    seen: set[int] = set()
    total = 0
    for q in sequences:
        if not shared_prompts or q.group not in seen:
            total += prefill_flops(s, q.prompt, q.grids)
        seen.add(q.group)
        total += decode_flops(s, q.prompt, q.answer)
    return total


def logprob_flops(s: Shape, sequences: Iterable[Answered]) -> int:
    """Forward pass over prompt and answer, with the logits of the answer."""
    return sum(
        vision_flops(s, q.grids) + language_flops(s, q.prompt + q.answer) + head_flops(s, q.answer) for q in sequences
    )


@dataclass(frozen=True)
class Work:
    """FLOPs of a phase."""

    model: int
    """What the mathematics asks for: MFU."""
    hardware: int
    """With what is computed again: HFU."""


def train_flops(s: Shape, sequences: Iterable[Answered], recompute: bool, freeze_vision: bool) -> Work:
    """Forward and backward pass; backward costs twice the forward.

    recompute: gradient checkpointing runs the forward pass of every block again, the logits not. freeze_vision: the
    tower runs forward only.
    """
    model = hardware = 0
    for q in sequences:
        tower, layers = vision_flops(s, q.grids), language_flops(s, q.prompt + q.answer)
        tower_passes, again = (1, 0) if freeze_vision else (3, int(recompute))
        model += tower_passes * tower + 3 * (layers + head_flops(s, q.answer))
        hardware += again * tower + int(recompute) * layers
    return Work(model, model + hardware)


# --- against the peak -------------------------------------------------------------------------------------------------

PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB[23]00\b", 2500e12),
    (r"\bB[23]00\b", 2250e12),
    (r"\b(H200|GH200)\b(?!.*NVL)", 989e12),
    (r"\bH200\b.*NVL", 835e12),
    (r"\bH100\b.*NVL", 835e12),
    (r"\bH100\b.*PCIe", 756e12),
    (r"\bH[18]00\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\bA[18]00\b", 312e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bRTX A6000\b", 154.8e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX 4090\b", 165.2e12),
    (r"\bMI3(00X|25X)\b", 1307e12),
    (r"\bMI250X?\b", 191.5e12),
)
"""Dense bf16 FLOP/s of one device, by what the driver calls it: first match wins. From the makers' data sheets, where
those with sparsity are halved; MI250 counts as its two dies, which ROCm shows as devices of their own."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU, FLOP/s; None for one that is not in the table, a MIG slice, or a CPU."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(pattern, device_name)), None)


def utilisation(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Share of the devices' peak; None where the peak is not known or no time passed."""
    return flops / (seconds * devices * peak) if peak and seconds > 0 else None


def image_grids(token_ids: Iterable[int], image_token_id: int, merge: int = 2) -> tuple[Grid, ...]:
    """Grids of the pictures of a prompt, from its runs of image tokens alone.

    A run of n tokens becomes the most nearly square grid of n x merge^2 patches. Against the true grid only the windows
    at the edges can differ, well below a percent of the tower.
    """
    runs, length = [], 0
    for token in (*token_ids, None):
        if token == image_token_id:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    rows = [max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0) for n in runs]
    return tuple((1, r * merge, n // r * merge) for n, r in zip(runs, rows, strict=True))


def step_metrics(
    s: Shape,
    sequences: Sequence[Answered],
    times: Mapping[str, float],
    devices: int,
    peak: float | None,
    *,
    epochs: int = 1,
    reference: bool = True,
    old_logprobs: bool = False,
    recompute: bool = True,
    freeze_vision: bool = False,
    shared_prompts: bool = True,
) -> dict[str, float]:
    """`perf/mfu_rollout`, `perf/mfu_train` and `perf/hfu_train` of a GRPO step; {} where the peak is not known.

    The update holds, for each of `epochs`, training and the reference's log-probabilities, and once the policy's own
    where `old_logprobs`. times: as `Phases.take` gives them.
    """
    rollout = rollout_flops(s, sequences, shared_prompts)
    train, forward = train_flops(s, sequences, recompute, freeze_vision), logprob_flops(s, sequences)
    passes = forward * (epochs * reference + old_logprobs)
    found = {
        "perf/mfu_rollout": utilisation(rollout, times.get("time/rollout_s", 0.0), devices, peak),
        "perf/mfu_train": utilisation(epochs * train.model + passes, times.get("time/update_s", 0.0), devices, peak),
        "perf/hfu_train": utilisation(epochs * train.hardware + passes, times.get("time/update_s", 0.0), devices, peak),
    }
    return {name: value for name, value in found.items() if value is not None}
