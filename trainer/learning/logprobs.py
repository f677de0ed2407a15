"""The model as the loss needs it: one forward pass over a micro-batch returns the log-probabilities of its
completion tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from trainer.algorithm.batching import MicroBatch, send_tensor
from trainer.data.processor import dummy_image
from trainer.learning import attention, experts, gated_delta

LOGITS = 1 << 27
"""Logits that exist at a time: 0.5 GiB in fp32, 880 tokens of Qwen2.5's vocabulary."""


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], targets [N]) -> log-probabilities [N]; without gradient entropies [N]
    and whether the target is the most probable token [N], 1 or 0; fp32.

    Never more than `limit` logits at a time: the forward pass goes over tokens. The backward pass computes
    them again and goes over the vocabulary, so that each block's weight gradient is one product, written
    once, in the weight's own type: there is no fp32 copy of [V, H] (5 GB for 72B).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        limit: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """banned: bool [V]."""
        n, vocabulary = len(hidden), len(weight)
        logprobs, entropies, greedy = hidden.new_empty((3, n), dtype=torch.float32)
        log_z = torch.empty_like(logprobs)
        step = max(1, limit // vocabulary)
        for at in range(0, n, step):
            part = slice(at, at + step)
            logits = _logits(hidden[part], weight, banned, temperature)
            log_z[part] = z = logits.logsumexp(-1)
            picked = logits.gather(1, targets[part, None])[:, 0]
            logprobs[part], greedy[part] = picked - z, (picked >= logits.amax(-1)).float()
            p = (logits - z[:, None]).exp_()
            entropies[part] = z - p.mul_(logits.masked_fill_(banned, 0)).sum(-1)
            del logits, p  # before the next chunk is made
        # The parameter itself is saved: ZeRO-3 lets go of its content and gathers it again before the
        # backward pass.
        ctx.save_for_backward(hidden, weight, targets, banned, log_z)
        ctx.temperature, ctx.limit = temperature, limit
        ctx.mark_non_differentiable(entropies, greedy)
        return logprobs, entropies, greedy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # ty: ignore[incompatible-method-override]
        """[N] -> those of hidden and weight."""
        hidden, weight, targets, banned, log_z = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        scale = (grad / ctx.temperature)[:, None]
        step = max(1, ctx.limit // max(len(hidden), 1))
        for at in range(0, len(weight), step):
            rows = weight[at : at + step]
            logits = _logits(hidden, rows, banned[at : at + step], ctx.temperature)
            # d loss / d logits = grad (onehot - p) / temperature
            d = logits.sub_(log_z[:, None]).exp_().mul_(-scale)
            local = targets - at
            inside = (local >= 0) & (local < len(rows))
            d.scatter_add_(1, local.clamp(0, len(rows) - 1)[:, None], scale * inside[:, None])
            d = d.to(hidden.dtype)
            if needs_hidden:
                grad_hidden += d @ rows
            if grad_weight is not None:
                torch.mm(d.t(), hidden, out=grad_weight[at : at + step])
            del logits, d, inside, local  # before the next block is made
        return grad_hidden.to(hidden.dtype) if needs_hidden else None, grad_weight, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, banned: Tensor, temperature: float) -> Tensor:
    """fp32 [n, v]."""
    return (hidden @ weight.t()).float().div_(temperature).masked_fill_(banned, float("-inf"))


class LogprobHead(nn.Module):
    """Replaces a model's `lm_head`. The parameter keeps its name, and stays shared with the embedding if it
    was.

    A pass calls this module once, whatever the number of tokens: ZeRO-3 gathers the weight once per forward
    and once per backward pass. With a call per chunk, a rank would gather as often as it has chunks, and
    ranks with unequal numbers of chunks would hang.
    """

    def __init__(self, linear: nn.Linear, banned_token_ids: list[int], temperature: float) -> None:
        super().__init__()
        self.weight = linear.weight
        self.temperature = temperature
        self.limit = LOGITS
        vocabulary = getattr(linear.weight, "ds_shape", linear.weight.shape)[0]
        banned = torch.zeros(vocabulary, dtype=torch.bool)
        banned[banned_token_ids] = True
        self.register_buffer("banned", banned, persistent=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [N, H] that predict `targets` [N] -> log-probabilities, entropies, greedy hits
        [N]."""
        return ChunkedLogprobs.apply(hidden, self.weight, targets, self.banned, self.temperature, self.limit)


class LogprobModel(nn.Module):
    """forward(MicroBatch) -> log-probabilities, entropies and greedy hits [N] of the completion tokens, in
    float32. The distribution is the one that the engine samples from: temperature applied, banned ids left
    out. recurrence: what computes the recurrence of gated delta-net layers; None: PyTorch."""

    def __init__(
        self,
        model: Any,
        banned_token_ids: list[int],
        temperature: float,
        freeze_vision: bool,
        recurrence: gated_delta.Recurrence | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.freeze_vision = freeze_vision
        self.has_vision = hasattr(model.model, "visual")
        attention.use_attention(model)
        gated_delta.use_packed_delta(model, recurrence)
        experts.use_grouped_experts(model)
        model.lm_head = LogprobHead(model.lm_head, banned_token_ids, temperature)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and greedy hits of the micro-batch's completion tokens, [N] each."""
        hidden = self._hidden(batch)
        return self.model.lm_head(hidden[0].index_select(0, batch.logits_at), batch.targets)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden states [1, T, H]. All ranks call the modules in the same order, with an image or
        without: ZeRO-3 gathers by that order. transformers' forward pass puts the image features where the
        architecture wants them: into the embeddings, and with DeepStack into the first layers too."""
        inner = self.model.model
        packed: Any = {"attention_mask": None, "use_cache": False, "layout": batch.layout}
        if not self.has_vision:
            return inner(batch.input_ids, position_ids=batch.position_ids[0], **packed)[0]
        packed["position_ids"] = batch.position_ids
        features = self._features(batch)
        if batch.pixel_values is not None:
            return inner(batch.input_ids, mm_encoder_outputs={"image": features}, **packed)[0]

        # The dummy image's features are added as a zero, so that every parameter of the tower gets a gradient
        # (of zeros) by the path that an image's gradient takes. With adapters on frozen weights, only modules
        # on that path have a backward pass.
        zero = 0.0 * _total(features)
        hook = inner.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, embeds: embeds + zero
        )
        try:
            return inner(batch.input_ids, **packed)[0]
        finally:
            hook.remove()

    def _features(self, batch: MicroBatch) -> Any:
        """The vision tower's output for the images of a micro-batch, or for a dummy image if it has none."""
        inner = self.model.model
        device = batch.input_ids.device
        pixels = batch.pixel_values
        grid = torch.tensor(batch.grids)
        if pixels is None:
            tower = self.model.config.vision_config
            dim = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
            pixels, grid = dummy_image(dim, tower.spatial_merge_size)
            pixels = send_tensor(pixels, device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision):
            return inner.get_image_features(
                pixels, grid, return_dict=True, **tower_arguments(inner.visual, grid, device)
            )


def _total(features: Any) -> Any:
    """The sum of all of a vision tower's features, DeepStack's too."""
    total = 0
    for output in (features.pooler_output, *getattr(features, "deepstack_features", ())):
        for part in output:
            total = total + part.sum()
    return total


def tower_arguments(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Tensor | int]:
    """Arguments of `get_image_features` for images of `grid`, int [images, 3] on the CPU. They are each
    patch's position, the bounds of the images and the length of the longest. For Qwen2.5-VL they are also its
    attention windows, for Qwen3-VL the indices and weights with which it reads its table of positions."""
    bounds = get_vision_cu_seqlens(grid)
    computed: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grid, tower.spatial_merge_size),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, window_bounds = get_vision_window_index(
            grid, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        computed |= {
            "window_index": index,
            "cu_window_seqlens": window_bounds,
            "max_window_seqlen": int(window_bounds.diff().max()),
        }
    if hasattr(tower, "num_grid_per_side"):
        computed["interp_indices"], computed["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
    arguments: dict[str, Tensor | int] = {}
    for name, value in computed.items():
        arguments[f"image_{name}"] = send_tensor(value, device) if isinstance(value, Tensor) else value
    return arguments
