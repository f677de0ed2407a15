"""What a training step makes beside weights and states: activations that autograd saves, work in progress, logits.

Counted from the modules' code (transformers 5.19, modeling_qwen2_5_vl.py; trainer/engine/logprobs.py), per token or
per patch; tests/recipes/test_activations.py holds the sums against the tensors that are really saved and really live.
`w` is the width of the model's dtype in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import RunConfig
from trainer.hardware.model_shapes import Shape

LOGITS_CHUNK = 1024
"""`LOGITS_CHUNK_TOKENS` of the trainer: with more answer tokens than this, chunks are recomputed and none is saved."""
LOGITS_SAVED = 4
"""Per logit, by logsumexp, which needs its input: fp32."""
LOGITS_FORWARD = 16
"""Per logit, at the entropy's product: the logits, their probabilities, the masked logits, the product; all fp32."""
LOGITS_BACKWARD = 20
"""Per logit, at logsumexp's gradient: the logits, the gradient of gather, and three temporaries; all fp32."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch at its worst: longest prompts with the largest pictures, longest answers."""

    sequences: int
    length: int
    """Tokens of one sequence."""
    answers: int
    """Answer tokens of all sequences."""
    patches: int
    """Of all pictures."""
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length


def micro_batch(config: RunConfig, shape: Shape) -> MicroBatch:
    """The largest micro-batch that the configuration allows."""
    size, answer = config.algorithm.micro_batch, config.rollout.max_tokens
    length = config.data.prompt_max_tokens + answer
    if config.method == "sft":
        length = answer = config.sft.max_tokens
    patches = config.model.max_pixels // shape.vision.patch**2 if shape.vision else 0
    width = 2 if config.model.dtype == "bf16" else 4
    return MicroBatch(sequences=size, length=length, answers=size * answer, patches=size * patches, width=width)


def norm(hidden: int, w: int) -> int:
    """An RMSNorm: its input in fp32, that normalized in the model's dtype, and its output."""
    return hidden * (4 + 2 * w)


def decoder_layer(shape: Shape, length: int, w: int, attention: str) -> int:
    """Per token: two norms; rotated q, rotated k, v, attention's output and its log-sum-exp; gate, its activation, up
    and their product. Eager attention has k and v repeated for every head, and a row of probabilities per head."""
    heads, kv, d = shape.heads, shape.kv_heads, shape.head_dim
    attended = w * 2 * (heads + kv) * d + 4 * heads
    if attention == "eager":
        attended = w * 4 * heads * d + probabilities(heads, length, w)
    return 2 * norm(shape.hidden, w) + attended + w * 4 * shape.intermediate


def probabilities(heads: int, length: int, w: int) -> int:
    """Per token that attends to `length` others: the softmax's output in fp32, and in the model's dtype."""
    return heads * length * (4 if w == 4 else 4 + w)


def tower(shape: Shape, picture: int, w: int, attention: str) -> float:
    """Per patch, an average block of the vision tower over pictures of `picture` patches: two norms; q, k, v as one
    tensor, rotated q and k, the windows' outputs and these in one; gate, its activation, up and their product."""
    assert (v := shape.vision)
    total = 2 * norm(v.hidden, w) + w * (7 * v.hidden + 4 * v.intermediate) + 4 * v.heads
    if attention != "eager":
        return total
    window = (v.window // v.patch) ** 2
    attended = v.full * picture + (v.depth - v.full) * min(picture, window)
    return total + probabilities(v.heads, attended, w) / v.depth


def saved(config: RunConfig, shape: Shape) -> dict[str, float]:
    """Bytes that the backward pass needs of the decoder's layers, of its head and of the pictures; under gradient
    checkpointing only each layer's input."""
    batch, w = micro_batch(config, shape), 2 if config.model.dtype == "bf16" else 4
    whole = not config.model.gradient_checkpointing
    per_token = decoder_layer(shape, batch.length, w, config.model.attention) if whole else w * shape.hidden
    head = batch.tokens * shape.hidden * (4 + w) + batch.answers * shape.hidden * w  # the last norm; the answers' rows
    if batch.answers <= LOGITS_CHUNK:
        head += batch.answers * shape.vocabulary * LOGITS_SAVED
    per_patch = 0.0
    if (v := shape.vision) and not config.model.freeze_vision:
        picture = batch.patches // batch.sequences
        block = tower(shape, picture, w, config.model.attention) if whole else w * v.hidden
        merger = norm(v.hidden, w) + w * 2 * v.hidden  # the activation's input and output, four patches to a token
        own_pixels = 0 if w == 4 else w * v.channels * v.temporal * v.patch**2
        per_patch = v.depth * block + merger + own_pixels
    vision = pictures(config, shape) + batch.patches * per_patch
    return {"layers": float(batch.tokens * shape.layers * per_token), "head": float(head), "pictures": vision}


def backward(config: RunConfig, shape: Shape) -> dict[str, float]:
    """The largest of the moments of a backward pass: at the logits, in the last decoder layer, in the tower."""
    batch, w = micro_batch(config, shape), 2 if config.model.dtype == "bf16" else 4
    keep = saved(config, shape)
    per_logit = LOGITS_BACKWARD - (LOGITS_SAVED if batch.answers <= LOGITS_CHUNK else 0)
    chunk = min(LOGITS_CHUNK, batch.answers) * shape.vocabulary * per_logit
    # Gradients of gate and up; under checkpointing the layer's activations too, but for its input, which was saved.
    again = decoder_layer(shape, batch.length, w, config.model.attention) - w * shape.hidden
    per_token = w * 2 * shape.intermediate + config.model.gradient_checkpointing * again
    moments = [
        {"saved activations": sum(keep.values()), "logits": float(chunk)},
        {"saved activations": keep["layers"] + keep["pictures"], "layer at work": float(batch.tokens * per_token)},
    ]
    if (v := shape.vision) and not config.model.freeze_vision:
        again = tower(shape, batch.patches // batch.sequences, w, config.model.attention) - w * v.hidden
        per_patch = w * 2 * v.intermediate + config.model.gradient_checkpointing * again
        moments.append({"saved activations": keep["pictures"], "layer at work": float(batch.patches * per_patch)})
    return max(moments, key=lambda parts: sum(parts.values()))


def forward(config: RunConfig, shape: Shape) -> float:
    """Bytes of a forward pass without gradients: the pictures, and of the layer at work the residual stream, a norm's
    output and three of the MLP's tensors."""
    batch, v = micro_batch(config, shape), shape.vision
    text = batch.tokens * (2 * shape.hidden + 3 * shape.intermediate)
    vision = batch.patches * (2 * v.hidden + 3 * v.intermediate) if v else 0
    return pictures(config, shape) + batch.width * max(text, vision)


def pictures(config: RunConfig, shape: Shape) -> float:
    """Bytes of the pixels, which come in fp32."""
    v = shape.vision
    return 4.0 * micro_batch(config, shape).patches * v.channels * v.temporal * v.patch**2 if v else 0.0


def logits(config: RunConfig, shape: Shape) -> float:
    """Bytes of a chunk of logits in a forward pass, with all that is live beside them: the pictures, the last hidden
    states, the answers' rows."""
    batch = micro_batch(config, shape)
    rows = (batch.tokens + batch.answers) * shape.hidden * batch.width
    return pictures(config, shape) + rows + min(LOGITS_CHUNK, batch.answers) * shape.vocabulary * LOGITS_FORWARD
