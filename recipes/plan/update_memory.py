"""Bytes on a GPU that an update takes besides the states: gradients, its passes, the optimizer's step."""

from __future__ import annotations

from recipes.plan import activations
from recipes.plan.activations import dtype_bytes, is_whole
from trainer.config import RunConfig
from trainer.config.budget import reduce_bucket, reduces_blocks
from trainer.hardware.model_shapes import Shape


def gradient_bytes(config: RunConfig, t: int) -> dict[str, float]:
    """Gradients of `t` trained parameters, and the bucket that they are reduced in.

    DeepSpeed allocates both once and keeps them; `offload` moves them away too. On CPU only the pages of the
    bucket that gradients have touched are resident.
    """
    width = dtype_bytes(config)
    on_gpu = config.placement.device == "cuda"
    stage = config.optimizer.zero_stage
    shares = 1 / config.placement.world_size
    if stage == 1:  # it has all gradients until they are reduced
        shares += 1

    elements = reduce_bucket(config)
    bucket = float((elements if on_gpu else min(elements, t)) * width)
    if is_whole(config) and reduces_blocks(config):  # autograd adds up where the optimizer's step reads
        bucket = 0.0
    # Stages 1 and 2 fill one bucket while the other is reduced; at stage 1 in the type that gradients add up
    # in.
    if on_gpu and stage == 2:
        bucket *= 2
    elif on_gpu and stage == 1:
        bucket *= 2 * _gradient_width(config) // width
    return {"gradients": t * _gradient_width(config) * shares, "reduce bucket": bucket}


def backward(config: RunConfig, shape: Shape, bucket: float, t: int) -> dict[str, float]:
    """A pass with gradients of `t` parameters, at the end of its forward half or in its backward half. A
    bucket that all of them fit into is only scattered when that is over."""
    parts = activations.backward(config, shape)
    if t > reduce_bucket(config):
        parts |= scattered(config, bucket)
    return peak_of(activations.scored(config, shape), parts)


def scattered(config: RunConfig, bucket: float) -> dict[str, float]:
    """DeepSpeed's reduce_scatter_coalesced lays the bucket out once more, by ranks; Gloo reduces a clone of
    that."""
    return {"bucket being scattered": bucket * (1 if config.placement.device == "cuda" else 2)}


def optimizer_step(config: RunConfig, shard: float, most: int) -> dict[str, float]:
    """What the optimizer's step takes for a sub-group of at most `most` elements: gradients flattened, and in
    fp32 if they are not; what AdamW makes unless it is fused."""
    group = min(most, shard)
    width = _gradient_width(config)
    # Gradients of ZeRO-1 and 2 add up in the flat fp32 buffer that the step reads.
    adds_up_in_place = config.optimizer.zero_stage < 3 and width > dtype_bytes(config)
    if config.optimizer.offload_optimizer or adds_up_in_place:
        return {}
    parts = {"flat gradients": float(width * group), "fp32 gradients": 4.0 * group if width < 4 else 0.0}
    if config.placement.device != "cuda":
        parts["Adam's temporaries"] = 8.0 * group  # the square root and the quotient
    return parts


def peak_of(first: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The moment that needs more; the two do not coincide."""
    return max(first, other, key=lambda parts: sum(parts.values()))


def _gradient_width(config: RunConfig) -> int:
    return 4 if config.optimizer.grad_accum_dtype == "fp32" else dtype_bytes(config)
