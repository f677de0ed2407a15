"""What a training step makes beside weights and states: activations that autograd saves, work in progress,
logits.

Counted per token or per patch from the modules (transformers 5.19, modeling_qwen2_5_vl.py and
modeling_qwen3_vl.py, and trainer/learning/logprobs.py); tests/recipes/test_activations.py holds the sums
against tensors really saved and live. `w` is the width of the model's dtype in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import RunConfig
from trainer.config.budget import (
    CHUNK,
    decoder_layers,
    laid_out,
    laid_out_tokens,
    largest_layer,
    longest_sample,
    micro_batch_tokens,
    norm_bytes,
    reduces_blocks,
    repeated_keys,
    routed_bytes,
    tower_block_bytes,
)
from trainer.config.turns import images_of
from trainer.hardware.model_shapes import Shape, Vision

LOGITS = 1 << 27
"""`LOGITS` of the trainer's head: so many exist at a time, and none is saved."""
LOGITS_FORWARD = 16
"""Bytes per logit in a forward pass: the logits and three temporaries of logsumexp; all fp32."""


@dataclass(frozen=True, kw_only=True)
class PassSize:
    """One micro-batch at its worst: longest prompts with the largest images that they can hold, longest
    completions."""

    sequences: int
    tokens: int
    """Tokens of prompts and completions."""
    patches: int
    """Patches of all images."""
    width: int


def dtype_bytes(config: RunConfig) -> int:
    """Bytes of a number in the model's own type."""
    return 2 if config.model.dtype == "bf16" else 4


def is_whole(config: RunConfig) -> bool:
    """Whether a rank's shards at stage 3 are the whole weights."""
    return config.optimizer.zero_stage == 3 and config.placement.world_size == 1


def micro_batch(config: RunConfig, shape: Shape, tokens: int = 0) -> PassSize:
    """The largest pass of so many tokens (default: the update's): as many of the longest samples as it takes,
    each with the largest images; for the head, every token as if it were a completion's."""
    longest = longest_sample(config)  # which stands alone if it is over the budget
    tokens = max(tokens or micro_batch_tokens(config, shape), longest)
    sequences = tokens // longest
    patches = 0
    if shape.vision:
        patches = largest_image(config, shape.vision) + later_images(config, shape.vision)
    width = dtype_bytes(config)
    return PassSize(sequences=sequences, tokens=tokens, patches=sequences * patches, width=width)


def largest_image(config: RunConfig, vision: Vision) -> int:
    """Patches of the largest image that a sample may have: of `max_pixels`, if the longest prompt holds its
    tokens. Longer prompts are left out of the data."""
    room = config.sft.max_tokens if config.method == "sft" else config.data.prompt_max_tokens
    return min(config.model.max_pixels // vision.patch**2, room * vision.merge**2)


def later_images(config: RunConfig, vision: Vision) -> int:
    """Patches of the images that observations of one episode may show: one for each but the last of
    `turns.limit` replies, as far as `rollout.max_tokens` holds their tokens."""
    patches = images_of(config.turns) * (config.turns.image_pixels // vision.patch**2)
    return min(patches, config.rollout.max_tokens * vision.merge**2)


def saved(config: RunConfig, shape: Shape) -> dict[str, float]:
    """Bytes that the backward pass needs of the decoder's layers, of its head and of the images; under
    gradient checkpointing only each layer's input. All layers share the cosines and sines of the
    positions."""
    batch = micro_batch(config, shape)
    w = dtype_bytes(config)
    whole = not config.model.gradient_checkpointing
    per_token = w * shape.hidden * shape.layers
    if whole:
        per_token = decoder_layers(shape, w) + shape.layers * adapted(config, shape, w)
    rows = 1 if config.lora.rank else 2
    head = batch.tokens * shape.hidden * (4 + rows * w)  # last norm; rows of completions
    per_patch = 0.0
    if (v := shape.vision) and config.tower_trained:
        block = tower_block_bytes(shape, w) if whole else w * v.hidden
        own_pixels = 0 if w == 4 else w * v.channels * v.temporal * v.patch**2
        per_patch = v.depth * block + mergers(v, w) + own_pixels + rotary(v)
    layers = batch.tokens * (per_token + w * 2 * shape.head_dim)
    return {
        "layers": float(layers),
        "head": float(head),
        "images": images(config, shape) + batch.patches * per_patch,
    }


def backward(config: RunConfig, shape: Shape) -> dict[str, float]:
    """The largest of the moments of a backward pass: at the logits, in the last decoder layer's MLP and its
    attention, in the tower."""
    batch = micro_batch(config, shape)
    w = dtype_bytes(config)
    keep = saved(config, shape)
    block = min(LOGITS, batch.tokens * shape.vocabulary)
    gradient = 0 if config.lora.rank else shape.embedding_parameters * w
    logits = block * (4 + w if w < 4 else 4) + batch.tokens * shape.hidden * (4 + w) + gradient
    # Gradients of gate and up; under checkpointing the layer's activations too, but for its input, which was
    # saved.
    again = largest_layer(shape, w) + adapted(config, shape, w) - w * shape.hidden
    per_token = (
        w * 2 * shape.intermediate + config.model.gradient_checkpointing * again + beside(config, shape, w)
    )
    # The gradient of a head that is the embedding too waits for the embedding's part, until the pass is over.
    waiting = float(gradient) if shape.tied else 0.0
    # ZeRO-3 reduces them when the block's backward pass has ended: all of them are whole until then.
    reduced = config.optimizer.zero_stage == 3 and not is_whole(config)
    whole = w if reduced and not config.lora.rank else 0
    of_mlp = float(whole * sum(shape.rest_sizes))
    of_layer = float(whole * shape.layer_parameters)
    # The trainer lays a block's gradients out by ranks; they are reduced while the next block computes.
    reducing = of_layer if reduces_blocks(config) else 0.0
    # Prompts' keys are repeated for each completion, in each layer that is kept; their gradients, and one of
    # these in fp32, come when the MLP's part is gone.
    keys = repeated_keys(config, shape, batch.tokens)
    layers = 1 if config.model.gradient_checkpointing else shape.attention_layers
    kept = kept_keys(config, shape, batch.tokens)
    mlp = w * shape.intermediate * (2 + 4 * config.model.gradient_checkpointing)
    if config.model.gradient_checkpointing:
        mlp += routed_bytes(shape, w)
    moments = [
        {"saved activations": sum(keep.values()), "logits": float(logits), "head": head(config, shape)},
        {
            "saved activations": keep["layers"] + keep["images"],
            "layer at work": float(batch.tokens * per_token),
            "gradients of the block": of_mlp,
            "gradients being reduced": reducing,
            "repeated keys": kept,
            "the tied head's gradient": waiting,
        },
        {
            "saved activations": keep["layers"] + keep["images"],
            "layer at work": float(batch.tokens * (per_token - mlp)),
            "gradients of the block": of_layer,
            "gradients being reduced": reducing,
            "repeated keys": keys * (layers + 2) / (layers + 1),
            "the tied head's gradient": waiting,
        },
    ]
    if (d := shape.delta) is not None:
        # The recurrence's backward pass: what its output was normalized with is gone like the MLP's part.
        moments.append(
            {
                "saved activations": keep["layers"] + keep["images"],
                "layer at work": float(batch.tokens * (per_token - mlp - 12 * d.values)),
                "gradients of the block": of_mlp,
                "gradients being reduced": reducing,
                "repeated keys": kept + laid_out_gradients(config, shape, batch.tokens),
                "the tied head's gradient": waiting,
            }
        )
    if (v := shape.vision) and config.tower_trained:
        again = tower_block_bytes(shape, w) - w * v.hidden
        per_patch = w * 2 * v.intermediate + config.model.gradient_checkpointing * again
        moments.append(
            {
                "saved activations": keep["images"],
                "layer at work": float(batch.patches * per_patch),
                "gradients of the block": float(whole * sum(v.block_sizes)),
                "gradients being reduced": reducing,
                "the tied head's gradient": waiting,
            }
        )
    return max(moments, key=lambda parts: sum(parts.values()))


def scored(config: RunConfig, shape: Shape) -> dict[str, float]:
    """The end of a forward pass that keeps what its backward pass will need: a chunk of logits beside all of
    it."""
    batch = micro_batch(config, shape)
    logits = min(LOGITS, batch.tokens * shape.vocabulary) * LOGITS_FORWARD
    kept = 0.0 if config.model.gradient_checkpointing else kept_keys(config, shape, batch.tokens)
    parts = {"saved activations": sum(saved(config, shape).values()), "logits": float(logits)}
    parts["head"] = head(config, shape)
    return parts | ({"repeated keys": kept} if kept else {})


def head(config: RunConfig, shape: Shape) -> float:
    """Bytes by which a gathered head, or embedding, is larger than a gathered block; 0 where all is whole."""
    if config.optimizer.zero_stage < 3 or is_whole(config):
        return 0.0
    return float(dtype_bytes(config) * max(0, shape.embedding_parameters - shape.layer_parameters))


def forward(config: RunConfig, shape: Shape, tokens: int = 0) -> float:
    """Bytes of a forward pass without gradients: the images, and of the layer at work the embeddings, the
    layer's input, the residual stream, a norm's output and three of the MLP's tensors, or what attention
    takes; in the tower also cosines and sines in fp32."""
    batch, v = micro_batch(config, shape, tokens), shape.vision
    mlp = 3 * shape.intermediate
    if shape.experts:
        # The product of gate and up; or the input of the last product, and what comes out twice.
        mlp = max(4 * shape.intermediate, shape.intermediate + 2 * shape.experts.active * shape.hidden)
    text = batch.width * batch.tokens * (4 * shape.hidden + mlp)
    text += batch.tokens * beside(config, shape, batch.width)
    if v:
        # All features of images, as they come and put together; with DeepStack also the stream that its
        # features were added to.
        merged = batch.patches // v.merge**2
        stream = batch.tokens if v.deepstack else 0
        text += batch.width * shape.hidden * (stream + 2 * (1 + v.deepstack) * merged)
    # Attention, before the MLP: the layer's input, a norm's output; q rotated and in order, its output; k and
    # v.
    heads = (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = batch.width * batch.tokens * (2 * shape.hidden + heads)
    attention += repeated_keys(config, shape, batch.tokens, gradients=False)
    attention = max(attention, delta_forward(config, shape, batch.tokens, batch.width))
    per_patch = batch.width * (2 * v.hidden + (3 if v.gated else 2) * v.intermediate) + rotary(v) if v else 0
    return images(config, shape, tokens) + max(text, attention, batch.patches * per_patch)


def delta_forward(config: RunConfig, shape: Shape, tokens: int, w: int) -> float:
    """Bytes of a gated delta-net layer in a pass without gradients, while its recurrence is computed: the
    stream, and what queries, keys and values are made of, for each token of the row; queries, keys and values
    as they are laid out, and in fp32 what the recurrence makes of them, for each token that is laid out."""
    if (d := shape.delta) is None:
        return 0.0
    keys = d.value_heads * d.key_dim
    copied = 2 * keys if d.value_heads > d.key_heads else 0
    row = w * (4 * shape.hidden + d.channels + d.values + copied)
    work = 4 * (6 * keys + 4 * d.values + 3 * d.value_heads * CHUNK)
    laid = laid_out_tokens(config, shape, tokens, gradients=False)
    return tokens * row + laid * (w * (2 * keys + d.values) + work)


def kept_keys(config: RunConfig, shape: Shape, tokens: int) -> float:
    """Bytes that the layers keep because completions share prompts: attention's repeated keys, and the tokens
    that gated delta-net layers lay out more than the row has."""
    again = config.model.gradient_checkpointing
    layers = 1 if again else shape.attention_layers
    attended = repeated_keys(config, shape, tokens) * layers / (layers + 1)
    if (d := shape.delta) is None:
        return attended
    more = laid_out_tokens(config, shape, tokens) - tokens
    delta = more * laid_out(d, dtype_bytes(config))
    return max(attended, delta) if again else attended + d.layers * delta


def laid_out_gradients(config: RunConfig, shape: Shape, tokens: int) -> float:
    """Bytes of the gradients of a recurrence, in fp32: of queries, keys and both kinds of values over all
    chunks, the chunk's at work and their sum."""
    assert (d := shape.delta)
    keys = d.value_heads * d.key_dim
    return laid_out_tokens(config, shape, tokens) * 4 * (5 * keys + 2 * d.values + d.value_heads * CHUNK)


def adapted(config: RunConfig, shape: Shape, w: int) -> int:
    """Bytes per token that a decoder layer with adapters saves more: the outputs of A, seven or with experts
    attention's four, less what the gradients of the norms' weights would need."""
    if not config.lora.rank:
        return 0
    factors = 4 if shape.experts else 7
    normed = 2 * shape.hidden
    if shape.qk_norm:
        normed += (shape.heads + shape.kv_heads) * shape.head_dim
    return w * factors * config.lora.rank - (4 if shape.delta else w) * normed


def beside(config: RunConfig, shape: Shape, w: int) -> int:
    """Bytes per token of what an adapter adds to the output of its layer in the MLP; experts have none."""
    return w * shape.intermediate if config.lora.rank and not shape.experts else 0


def mergers(tower: Vision, w: int) -> int:
    """Per patch: the norm, and the activation's input and output, four patches to a token. DeepStack's begin
    at a block's output, which the next block keeps."""
    if tower.gated:
        return norm_bytes(tower.hidden, w) + w * 2 * tower.hidden
    return w * tower.hidden * (1 + 3 * (1 + tower.deepstack))


def rotary(tower: Vision) -> int:
    """Bytes of a patch's cosines and sines, in fp32 and shared by all blocks."""
    return 4 * 2 * tower.hidden // tower.heads


def images(config: RunConfig, shape: Shape, tokens: int = 0) -> float:
    """Bytes of the pixels, which come in fp32."""
    v = shape.vision
    return (
        4.0 * micro_batch(config, shape, tokens).patches * v.channels * v.temporal * v.patch**2 if v else 0.0
    )


def logits(config: RunConfig, shape: Shape, tokens: int = 0) -> float:
    """Bytes of a chunk of logits in a forward pass, with all that is live beside them: the images, the last
    hidden states, the rows that predict completions."""
    batch = micro_batch(config, shape, tokens)
    rows = 2 * batch.tokens * shape.hidden * batch.width
    return (
        images(config, shape, tokens) + rows + min(LOGITS, batch.tokens * shape.vocabulary) * LOGITS_FORWARD
    )
