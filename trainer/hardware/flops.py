"""FLOPs of a model per phase, and what share of the GPUs' peak that is. Pure arithmetic, no torch.

Counted are matrix multiplications (2 FLOPs per multiply-add) with causal attention, as in PaLM's appendix B
(arXiv 2204.02311) less the half of the attention that a causal kernel skips. Not counted: norms, activations,
softmax, rotary embeddings, the embedding look-up, the optimizer, and padding. So these are the model's FLOPs:
time spent on anything else lowers the utilization (MFU). HFU adds the forward pass that gradient
checkpointing repeats (arXiv 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.hardware.model_shapes import Shape

Grid = tuple[int, int, int]
"""grid_thw of one image: temporal, vertical and horizontal patches."""


@dataclass(frozen=True)
class CompletedSequence:
    """One prompt with one completion."""

    prompt: int
    """Tokens, image tokens included."""
    completion: int
    """Tokens."""
    grids: tuple[Grid, ...] = ()
    """Grids of its images."""
    group: int = 0
    """Samples of one group share the prompt."""


# --- forward passes -----------------------------------------------------------------------------------------


def layer_flops_per_token(s: Shape) -> int:
    """Projections and MLP of one decoder layer with attention: q, k, v, o and `mlp_weights`."""
    return 2 * (sum(a * b for a, b in s.attention_linears) + mlp_weights(s))


def mlp_weights(s: Shape) -> int:
    """Weights of any decoder layer that a token is multiplied with besides: the three matrices of the gated
    MLP, or those of the experts that compute the token and what chooses them."""
    routers = s.experts.routers(s.hidden) if s.experts else 0
    return routers + 3 * s.hidden * s.intermediate


def delta_flops_per_token(s: Shape) -> int:
    """A gated delta-net layer: its matrices and MLP, the convolution, and per head three products with the
    state: what it holds of a key, what is put in its place, what the query reads. Kernels that compute a
    chunk of tokens at a time do more."""
    if s.delta is None:
        return 0
    d = s.delta
    matrices = sum(a * b for a, b in d.linears(s.hidden)) + mlp_weights(s)
    return 2 * (matrices + d.channels * d.kernel + 3 * d.value_heads * d.key_dim * d.value_dim)


def decoder_flops_per_token(s: Shape) -> int:
    """All decoder layers, without attention's scores and weighted values."""
    delta = s.delta.layers * delta_flops_per_token(s) if s.delta else 0
    return s.attention_layers * layer_flops_per_token(s) + delta


def attention_flops(s: Shape, first: int, last: int) -> int:
    """Scores and weighted values of all layers for the tokens at positions first..last, counted from 1.

    The token at position t sees t keys: 2 products x 2 FLOPs x heads x head_dim x t.
    """
    keys = last * (last + 1) // 2 - first * (first - 1) // 2 if last >= first else 0
    return 4 * s.attention_layers * s.heads * s.head_dim * keys


def head_flops(s: Shape, tokens: int) -> int:
    return 2 * s.hidden * s.vocabulary * tokens


def language_flops(s: Shape, tokens: int) -> int:
    """Forward pass of the decoder layers over one sequence, without logits."""
    return tokens * decoder_flops_per_token(s) + attention_flops(s, 1, tokens)


def vision_flops(s: Shape, grids: Iterable[Grid]) -> int:
    """Forward pass of the vision tower.

    Per patch: the embedding, and in every block qkv, the output projection and the MLP. Attention is not
    causal: all patches of a frame in `full`, in the others a window of window / patch per side, smaller at
    the edges. The merger, and those of DeepStack, map merge^2 patches together through two matrices.
    """
    v = s.vision
    if v is None:
        return 0
    total = 0
    for frames, height, width in grids:
        patches = frames * height * width
        embed = 2 * v.channels * v.temporal * v.patch**2 * v.hidden
        block = 2 * (4 * v.hidden**2 + (3 if v.gated else 2) * v.hidden * v.intermediate)
        total += patches * (embed + v.depth * block)
        side = v.window // v.patch // v.merge * v.merge
        windows = _squares(height, side) * _squares(width, side)
        seen = v.full * (height * width) ** 2 + (v.depth - v.full) * windows
        total += 4 * v.hidden * frames * seen
        merged = v.hidden * v.merge**2
        total += (1 + v.deepstack) * patches // v.merge**2 * 2 * merged * (merged + s.hidden)
    return total


def _squares(length: int, side: int) -> int:
    """Sum of the squares of the pieces of `length` cut every `side`."""
    return length // side * side**2 + (length % side) ** 2


# --- phases -------------------------------------------------------------------------------------------------


def prefill_flops(s: Shape, prompt: int, grids: Iterable[Grid] = ()) -> int:
    """Reads a prompt; logits of its last token, which give the first token of the completion."""
    return vision_flops(s, grids) + language_flops(s, prompt) + head_flops(s, 1)


def decode_flops(s: Shape, prompt: int, completion: int) -> int:
    """Writes a completion, token by token: the first came with the prefill, the last is never read."""
    steps = max(completion - 1, 0)
    linear = steps * decoder_flops_per_token(s)
    return linear + attention_flops(s, prompt + 1, prompt + steps) + head_flops(s, steps)


def rollout_flops(s: Shape, sequences: Sequence[CompletedSequence], shared_prompts: bool) -> int:
    """Generation. shared_prompts: a group's prompt is read once (prefix caching), not once per sample."""
    seen: set[int] = set()
    total = 0
    for q in sequences:
        if not shared_prompts or q.group not in seen:
            total += prefill_flops(s, q.prompt, q.grids)
        seen.add(q.group)
        total += decode_flops(s, q.prompt, q.completion)
    return total


def logprob_flops(s: Shape, sequences: Iterable[CompletedSequence]) -> int:
    """Forward pass over prompt and completion, with the logits of the completion."""
    return sum(
        vision_flops(s, q.grids) + language_flops(s, q.prompt + q.completion) + head_flops(s, q.completion)
        for q in sequences
    )


@dataclass(frozen=True)
class PhaseFlops:
    """FLOPs of a phase."""

    model: int
    """What the mathematics asks for: MFU."""
    hardware: int
    """With what is computed again: HFU."""


def train_flops(
    s: Shape,
    sequences: Iterable[CompletedSequence],
    recompute: bool,
    freeze_vision: bool,
    adapters: bool = False,
) -> PhaseFlops:
    """Forward and backward pass; backward costs twice the forward, once for weights that only carry adapters
    (their own products, a percent or so, are not counted).

    recompute: gradient checkpointing runs the forward pass of every block again, the logits not.
    freeze_vision: the tower runs forward only.
    """
    model = hardware = 0
    for q in sequences:
        tokens = q.prompt + q.completion
        tower = vision_flops(s, q.grids)
        layers = language_flops(s, tokens)
        attention = attention_flops(s, 1, tokens)
        passes = 2 if adapters else 3
        tower_passes, again = (1, 0) if freeze_vision else (passes, int(recompute))
        model += (
            tower_passes * tower + passes * (layers - attention + head_flops(s, q.completion)) + 3 * attention
        )
        hardware += again * tower + int(recompute) * layers
    return PhaseFlops(model, model + hardware)


# --- against the peak ---------------------------------------------------------------------------------------


def utilisation(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Share of the devices' peak; None where the peak is not known or no time passed."""
    return flops / (seconds * devices * peak) if peak and seconds > 0 else None


def image_grids(token_ids: Iterable[int], image_token_id: int, merge: int = 2) -> tuple[Grid, ...]:
    """Grids of the images of a prompt, from its runs of image tokens alone.

    A run of n tokens becomes the most nearly square grid of n x merge^2 patches. Against the true grid only
    the windows at the edges can differ, well below a percent of the tower.
    """
    runs, length = [], 0
    for token in (*token_ids, None):
        if token == image_token_id:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    rows = []
    for n in runs:
        rows.append(max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0))

    return tuple((1, r * merge, n // r * merge) for n, r in zip(runs, rows, strict=True))


def step_metrics(
    s: Shape,
    sequences: Sequence[CompletedSequence],
    times: Mapping[str, float],
    devices: int,
    peak: float | None,
    *,
    epochs: int = 1,
    reference: bool = True,
    old_logprobs: bool = False,
    teacher: Shape | None = None,
    recompute: bool = True,
    freeze_vision: bool = False,
    adapters: bool = False,
    shared_prompts: bool = True,
) -> dict[str, float]:
    """`perf/mfu_rollout`, `perf/mfu_train` and `perf/hfu_train` of a GRPO step; {} where the peak is not
    known.

    The update holds, for each of `epochs`, training and the reference's log-probabilities, and once the
    policy's own where `old_logprobs`, and those of a `teacher` of this shape. times: as `Phases.take` gives
    them.
    """
    rollout = rollout_flops(s, sequences, shared_prompts)
    train, forward = (
        train_flops(s, sequences, recompute, freeze_vision, adapters),
        logprob_flops(s, sequences),
    )
    passes = forward * (epochs * reference + old_logprobs)
    if teacher:
        passes += logprob_flops(teacher, sequences)
    shares = {
        "perf/mfu_rollout": utilisation(rollout, times.get("time/rollout_s", 0.0), devices, peak),
        "perf/mfu_train": utilisation(
            epochs * train.model + passes, times.get("time/update_s", 0.0), devices, peak
        ),
        "perf/hfu_train": utilisation(
            epochs * train.hardware + passes, times.get("time/update_s", 0.0), devices, peak
        ),
    }
    return {name: value for name, value in shares.items() if value is not None}
