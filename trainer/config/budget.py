"""How many tokens a pass holds, how much it gathers ahead and reduces at once, from a model's shape; for the
trainer and the plan."""

from __future__ import annotations

import math

from trainer.config.files import nodes_share_weights
from trainer.config.schema import RunConfig
from trainer.hardware import adapters
from trainer.hardware.layer_sizes import GatedDelta
from trainer.hardware.model_shapes import Shape
from trainer.system.errors import ConfigError

SAVED_BYTES, MOST_TOKENS = {"cuda": 8 << 30, "cpu": 1 << 30}, {"cuda": 16_384, "cpu": 4_096}
"""Two limits of a pass, by device: bytes that the backward pass needs of the layers, and tokens beyond which
its products get no faster."""
PREFETCH = 50_000_000, 500_000_000
"""Elements gathered ahead of their use: DeepSpeed's default, less than one matrix of 72B, and 1 GB in
bf16."""


KEY_BYTES = 1 << 30
"""Largest memory of the keys and values that attention reads in a pass, with their gradients: a shared
prompt's are repeated for each of its completions."""
LEAST_KEYS = 2.0
"""Keys per token that a pass may hold whatever they take: fewer would cut every group into single samples."""
SUB_GROUP = 500_000_000
"""DeepSpeed's sub_group_size: elements whose fp32 gradients the optimizer's step holds at a time. Half of its
default: 3 GB less on one GPU."""
REDUCE_BUCKET = 500_000_000
"""DeepSpeed's reduce_bucket_size: elements of gradients that are reduced together."""
SMALL_BUCKET = 50_000_000
"""The same where blocks are reduced without it: it holds what lies between them."""
WEIGHT_FILE = 5 << 30
"""Largest weight file of a hub model (planning figure): nodes that share a download share whole files."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""The fp32 master weight and two moments."""
CHUNK = 64
"""Tokens that a gated delta-net layer's recurrence computes at a time."""
PADDING = 17 / 16
"""What rounding adds to the lengths of samples that such a layer lays out: an eighth at most, so half of
that."""
NF4_BYTES, NF4_SCALES = 0.5, 1 / 64 + 4 / (64 * 256)
"""Per weight in 4 bits: itself; a byte per block of 64 and four per 256 blocks, which ZeRO does not cut."""


def takes_blocks(config: RunConfig, inference: bool = False) -> bool:
    """Whether the trainer gathers blocks whole under ZeRO-3, instead of DeepSpeed: a rank's shards of a block
    are of one type and on its device. DeepSpeed gathers hpZ's second copies, a reference on the host, and
    weights in 4 bits that are cut over several ranks."""
    on_host = inference and config.optimizer.offload_reference
    copied = not inference and config.optimizer.hpz_ranks > 1
    two_types = config.lora.qlora and config.placement.world_size > 1
    return config.optimizer.zero_stage == 3 and not (on_host or copied or two_types)


def reduces_blocks(config: RunConfig) -> bool:
    """Whether the trainer reduces the gradients of a block together, instead of DeepSpeed in its bucket."""
    return takes_blocks(config) and not config.optimizer.offload_optimizer


def reduce_bucket(config: RunConfig) -> int:
    """Elements of DeepSpeed's bucket of gradients."""
    return SMALL_BUCKET if reduces_blocks(config) else REDUCE_BUCKET


def policy_bytes(config: RunConfig, shape: Shape) -> float:
    """The policy's weights as they are gathered or kept whole, without adapters and without the scales of 4
    bits."""
    width = 2 if config.model.dtype == "bf16" else 4
    four = linear_weights(shape) if config.lora.qlora else 0
    return (shape.parameters - four) * width + four * NF4_BYTES


def linear_weights(shape: Shape) -> int:
    """Weights of the decoder's linear layers: those that `lora.qlora` keeps in 4 bits."""
    return sum(inputs * outputs for inputs, outputs in adapters.adapted_linears(shape, False))


def trained(config: RunConfig, shape: Shape) -> int:
    """Parameters that the optimizer holds, and a checkpoint."""
    if config.lora.rank:
        return sum(adapters.adapter_sizes(shape, config.lora.rank, config.lora.vision))
    frozen = shape.vision.parameters(shape.hidden) if config.model.freeze_vision and shape.vision else 0
    return shape.parameters - frozen


def check_experts(config: RunConfig, shape: Shape) -> None:
    """Raises ConfigError where `rollout.expert_parallel` is set and the model has no experts, and where
    `lora.qlora` is and it has some."""
    if config.lora.qlora and shape.experts:
        raise ConfigError(
            f"lora.qlora: experts of {config.model.path} in 4 bits have no parity test; set lora.qlora to"
            " false"
        )
    key = "rollout.expert_parallel"
    if config.rollout.expert_parallel and not shape.experts:
        raise ConfigError(f"{key}: {config.model.path} has no experts; set {key} to false")


def kept_checkpoints(config: RunConfig) -> int:
    """Checkpoints that lie on a node's disk at once: those that are kept, and the one that is written."""
    return config.checkpoint.keep_last + config.checkpoint.keep_best + 1


def written_checkpoints(config: RunConfig) -> int:
    """Checkpoints that lie on a node's disk at once, of those that the run itself will write: a run of few
    steps writes fewer than it may keep. The last step is always saved."""
    every = config.checkpoint.every_steps or 1
    kept = kept_checkpoints(config)
    return min(kept, math.ceil(config.run.max_steps / every)) if config.run.max_steps else kept


def checkpoints_bytes(config: RunConfig, learning: int, held: int = 0) -> int:
    """Bytes of the checkpoints on one node's disk. learning: number of parameters that are trained. held:
    bytes of those that earlier attempts left there."""
    each = learning * CHECKPOINT_BYTES_PER_PARAMETER
    most = each * kept_checkpoints(config) // config.placement.nodes
    return min(most, each * written_checkpoints(config) // config.placement.nodes + held)


def micro_batch_tokens(config: RunConfig, shape: Shape) -> int:
    """`algorithm.micro_batch_tokens`, or by default: what 8 GiB of saved activations allow if every token is
    an image's (1 GiB on a CPU), at most 16,384 (4,096), and at least the longest sample."""
    if config.algorithm.micro_batch_tokens:
        return config.algorithm.micro_batch_tokens
    device = config.placement.device
    affordable = int(SAVED_BYTES[device] / saved_per_token(config, shape))
    return max(longest_sample(config), min(affordable, MOST_TOKENS[device]))


def logprob_tokens(config: RunConfig, shape: Shape) -> int:
    """`algorithm.logprob_tokens`, or by default twice `micro_batch_tokens`: a pass without gradients saves
    nothing."""
    return config.algorithm.logprob_tokens or 2 * micro_batch_tokens(config, shape)


def key_bytes(config: RunConfig, shape: Shape, gradients: bool) -> int:
    """Memory of one key and its value that attention reads in a pass: in the layer at work, with their
    gradients in the backward pass; in every layer where none is recomputed."""
    width = 2 if config.model.dtype == "bf16" else 4
    whole = gradients and not config.model.gradient_checkpointing
    layers = shape.attention_layers if whole else 1
    return 2 * shape.kv_heads * shape.head_dim * width * (layers + gradients)


def keys_per_token(config: RunConfig, shape: Shape, tokens: int, gradients: bool = True) -> float:
    """Keys that a pass of `tokens` may hold for each of its tokens, so that they take `KEY_BYTES` at most.
    A gated delta-net layer lays as many tokens out."""
    largest = key_bytes(config, shape, gradients)
    if (d := shape.delta) is not None:
        width = 2 if config.model.dtype == "bf16" else 4
        kept = d.layers if gradients and not config.model.gradient_checkpointing else 1
        largest = max(largest, laid_out(d, width) * kept)
    return max(LEAST_KEYS, KEY_BYTES / largest / tokens)


def keys_per_pass(config: RunConfig, shape: Shape, tokens: int, gradients: bool = True) -> float:
    """Keys of a pass of `tokens` at most: nearly one prompt more for each completion of its groups; 0 where
    no prompt is shared."""
    if config.method == "sft":
        return 0.0
    most = keys_per_token(config, shape, tokens, gradients)
    return tokens * min(most, 1.0 + config.rollout.samples_per_prompt)


def repeated_keys(config: RunConfig, shape: Shape, tokens: int, gradients: bool = True) -> float:
    """Bytes of the keys and values that attention reads in a pass of `tokens` at most, with their
    gradients."""
    return keys_per_pass(config, shape, tokens, gradients) * key_bytes(config, shape, gradients)


def laid_out_tokens(config: RunConfig, shape: Shape, tokens: int, gradients: bool = True) -> float:
    """Tokens that a gated delta-net layer lays out in a pass of `tokens` at most, padding included."""
    return PADDING * max(tokens, keys_per_pass(config, shape, tokens, gradients))


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest completion."""
    return config.sft.max_tokens if config.method == "sft" else config.longest_sequence


def saved_per_token(config: RunConfig, shape: Shape) -> float:
    """Bytes that the backward pass needs of the layers for an image token; of a layer its input if it is
    recomputed."""
    w, again = 2 if config.model.dtype == "bf16" else 4, config.model.gradient_checkpointing
    text = shape.layers * w * shape.hidden if again else decoder_layers(shape, w)
    if not (v := shape.vision) or not config.tower_trained:
        return text
    return text + v.merge**2 * v.depth * (w * v.hidden if again else tower_block_bytes(shape, w))


def downloaded_bytes(config: RunConfig, model: float, together: bool) -> float:
    """Bytes of the base weights, `model` in all, that one node's disk holds: its share where nodes share the
    download, which may be a file more than another's. All of them where the nodes' files lie `together`,
    where the exporting node copies the frozen vision tower from them, and where rollout workers begin with
    them."""
    exports_base = (
        config.model.freeze_vision and not config.lora.rank and config.checkpoint.export_hf != "never"
    )
    if together or exports_base or config.fleet.gpus_per_node or not nodes_share_weights(config):
        return model
    return min(model, model / config.placement.nodes + WEIGHT_FILE)


def norm_bytes(hidden: int, w: int, centered: bool = False) -> int:
    """An RMSNorm: its input in fp32, that normalized in the model's dtype, and its output. centered: as
    Qwen3.5's, whose weights are counted from 1; it normalizes in fp32."""
    return hidden * (4 + (4 if centered else w) + w)


def decoder_layers(shape: Shape, w: int) -> int:
    """Per token, all decoder layers."""
    delta = shape.delta.layers * delta_layer(shape, w) if shape.delta else 0
    return shape.attention_layers * decoder_layer(shape, w) + delta


def largest_layer(shape: Shape, w: int) -> int:
    """Per token, the decoder layer that keeps most."""
    return max(decoder_layer(shape, w), delta_layer(shape, w))


def delta_layer(shape: Shape, w: int) -> int:
    """Per token, a gated delta-net layer as transformers computes it without flash-linear-attention, whose
    kernels keep less: norms and MLP; what is laid out; its output normalized, the gate and their product."""
    if (d := shape.delta) is None:
        return 0
    gated = d.values * (12 + 3 * w)
    mlp = w * 4 * shape.intermediate + routed_bytes(shape, w)
    return 2 * norm_bytes(shape.hidden, w, True) + mlp + laid_out(d, w) + gated


def laid_out(d: GatedDelta, w: int) -> int:
    """What a gated delta-net layer keeps of a token that it lays out: the convolution's input and output;
    what the recurrence keeps in fp32, for all value heads. That is queries and keys as they come, scaled and
    decayed (eight in all, and three more where none had to be copied from another type), three times the
    values, five rows of products within a chunk, a chunk's share of its state."""
    keys = d.value_heads * d.key_dim
    state = keys * d.value_dim // CHUNK
    recurrence = (8 if w < 4 else 11) * keys + 3 * d.values + 5 * d.value_heads * CHUNK + state
    return w * 2 * d.channels + 4 * recurrence


def decoder_layer(shape: Shape, w: int) -> int:
    """Per token: two norms; rotated q, rotated k, v, attention's output and its log-sum-exp; gate, its
    activation, up and their product. Of norms of q and k, whose output is not kept, the rest."""
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    attended = w * 2 * heads + 4 * shape.heads + shape.qk_norm * (4 + w) * heads
    if shape.delta:  # norms in fp32; the gate, and its product with attention's output
        attended += (4 - w) * heads + w * 2 * shape.heads * shape.head_dim
    return (
        2 * norm_bytes(shape.hidden, w, bool(shape.delta))
        + attended
        + w * 4 * shape.intermediate
        + routed_bytes(shape, w)
    )


def routed_bytes(shape: Shape, w: int) -> int:
    """Per token, what experts keep besides their products' inputs: a row for each that computes the token,
    going in and coming out, and the router's probabilities in fp32. Of a shared expert, whose input all have,
    what comes out, which its gate multiplies."""
    if (experts := shape.experts) is None:
        return 0
    rows = 2 * experts.active + bool(experts.shared)
    return w * rows * shape.hidden + 4 * experts.count


def tower_block_bytes(shape: Shape, w: int) -> int:
    """Per patch, a block of the vision tower: two norms; q, k and v as attention takes them, its output as it
    comes and in order; gate, its activation, up and their product. Without gates: LayerNorms' inputs and
    outputs; the first matrix's output and its activation, and of a Qwen2-VL's the sigmoid."""
    assert (v := shape.vision)
    norms, mlp = (norm_bytes(v.hidden, w), 4) if v.gated else (w * 2 * v.hidden, 3 if v.sigmoid else 2)
    return 2 * norms + w * (5 * v.hidden + mlp * v.intermediate) + 4 * v.heads


def prefetch_parameters(config: RunConfig, shape: Shape) -> int:
    """Elements gathered ahead: a decoder layer, within `PREFETCH`; never more than may stay gathered."""
    low, high = PREFETCH
    return min(config.optimizer.live_parameters, max(low, min(shape.layer_parameters, high)))


def attended_cost(shape: Shape) -> float:
    """Time of a token per token that it attends to, in its matrix products: by FLOPs, half a causal
    square."""
    return shape.attention_layers * shape.heads * shape.head_dim / shape.matmul_parameters


def image_token_cost(shape: Shape) -> float:
    """Time of an image token's patches in the tower, in a text token's matrix products."""
    v = shape.vision
    return v.merge**2 * v.parameters(shape.hidden) / shape.matmul_parameters if v else 0.0
