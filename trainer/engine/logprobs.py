"""The model as the loss wants it: one forward pass of a micro-batch gives its answer tokens' log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from trainer.algorithm.batching import MicroBatch
from trainer.data.processor import dummy_image

LOGITS_CHUNK_TOKENS = 1024
"""Logits of this many tokens exist at a time: 152k x 1024 x 4 bytes = 0.6 GB for Qwen2.5."""


class AnswerScorer(nn.Module):
    """forward(MicroBatch) -> log-probabilities and entropies [N] of the answer tokens, in float32.

    The distribution is the one that the engine samples from: temperature applied, banned ids left out.
    """

    def __init__(self, model: Any, banned_token_ids: list[int], temperature: float, freeze_vision: bool) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.freeze_vision = freeze_vision
        self.visual = getattr(model.model, "visual", None) and model.model.visual.__class__
        self.banned: Tensor
        self.register_buffer("banned", torch.tensor(banned_token_ids, dtype=torch.long), persistent=False)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[N], [N]."""
        hidden = self._hidden(batch)
        answers = hidden.reshape(-1, hidden.shape[-1])[batch.answer_at]  # [N, H]
        if len(answers) <= LOGITS_CHUNK_TOKENS:
            return self._score(answers, batch.targets)
        chunks = zip(answers.split(LOGITS_CHUNK_TOKENS), batch.targets.split(LOGITS_CHUNK_TOKENS), strict=True)
        scored = [recompute(self._score, h, t, use_reentrant=False) for h, t in chunks]
        return torch.cat([s[0] for s in scored]), torch.cat([s[1] for s in scored])

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden states [B, T, H]. Padding stands on the right, so under a causal mask it needs no masking."""
        inner = self.model.model
        mask = batch.attention_mask if "flash" in self.model.config._attn_implementation else None
        if not self.visual:
            # Without positions: transformers would take those of padding for the start of packed sequences.
            return inner(batch.input_ids, attention_mask=mask, use_cache=False)[0]
        embeds = inner.language_model.embed_tokens(batch.input_ids)
        pixels, grid = batch.pixel_values, batch.grid_thw
        if pixels is None:
            tower = self.model.config.vision_config
            dim = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
            pixels, grid = (t.to(embeds.device) for t in dummy_image(dim, tower.spatial_merge_size))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision):
            features = inner.visual(pixels.to(embeds.dtype), grid_thw=grid).pooler_output.to(embeds.dtype)
        if batch.image_at is None:
            embeds = embeds + 0.0 * features.sum()
        else:
            flat = embeds.reshape(-1, embeds.shape[-1])
            embeds = flat.index_copy(0, batch.image_at, features[batch.image_feature]).view_as(embeds)
        return inner.language_model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
        )[0]

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(hidden).float() / self.temperature  # [n, V]
        if len(self.banned):
            logits = logits.index_fill(1, self.banned, float("-inf"))
        log_z = logits.logsumexp(-1)
        logprobs = logits.gather(1, targets[:, None])[:, 0] - log_z
        with torch.no_grad():
            p = (logits - log_z[:, None]).exp()
            entropy = log_z - (p * logits.masked_fill(p == 0, 0)).sum(-1)
        return logprobs, entropy
