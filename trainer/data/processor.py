"""From a row to what policy and engine read: chat text, token ids with expanded placeholders, pixels, positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trainer.config import ConfigError, Model
from trainer.data.images import decode, size_of
from trainer.data.schema import Row


@dataclass(frozen=True)
class Encoded:
    """One prompt. The engine gets `text` and `images`; the policy gets the rest; both must agree on `token_ids`."""

    text: str
    token_ids: list[int]
    """Image placeholders expanded to one id per merged patch."""
    images: list[Image.Image]
    pixel_values: Tensor | None
    """[patches, channels * temporal * patch * patch] float32."""
    grid_thw: Tensor | None
    """[images, 3]: patches in time, height and width."""


class Prompter:
    """Encodes rows with the model's own processor. The one place where images are decoded and resized.

    Raises ConfigError if the model path holds no processor or tokenizer.
    """

    def __init__(self, model: Model) -> None:
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        revision = {"revision": model.revision} if model.revision else {}
        try:
            self.hf_config: Any = AutoConfig.from_pretrained(model.path, **revision)
            self.has_vision = getattr(self.hf_config, "vision_config", None) is not None
            loader = AutoProcessor if self.has_vision else AutoTokenizer
            self.processor: Any = loader.from_pretrained(model.path, **revision)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {model.path}: {str(error).splitlines()[0]}") from None
        self.tokenizer: Any = self.processor.tokenizer if self.has_vision else self.processor
        self.size = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
        self.image_token_id = getattr(self.hf_config, "image_token_id", None)
        self.merge_size = self.hf_config.vision_config.spatial_merge_size if self.has_vision else 1

    @property
    def eos_token_id(self) -> int:
        """The id that ends an answer."""
        return self.tokenizer.eos_token_id

    def banned_token_ids(self) -> list[int]:
        """Ids that must never be sampled: vision tokens, and the vocabulary's tail that no token stands behind.

        A sampled image token breaks training ("image features and image tokens do not match").
        """
        text_config = getattr(self.hf_config, "text_config", None) or self.hf_config
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
        ids = {getattr(self.hf_config, name, None) for name in names}
        ids |= {self.tokenizer.convert_tokens_to_ids(t) for t in ("<|vision_pad|>",) if t in self.tokenizer.get_vocab()}
        ids |= set(range(len(self.tokenizer), text_config.vocab_size))
        return sorted(i for i in ids if isinstance(i, int))

    def encode(self, row: Row) -> Encoded:
        """Chat template, tokenization and image processing of one row, up to where the answer begins.

        Raises ConfigError where an image does not decode or the placeholders do not match the images.
        """
        if not self.has_vision:
            if row.images:
                raise ConfigError(f"row {row.id} has images but the model reads text only: choose a VL model")
            messages = [{**m, "content": _plain(m["content"])} for m in row.messages]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return Encoded(text, self.tokenizer(text, add_special_tokens=False)["input_ids"], [], None, None)
        text = self.processor.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
        images = [decode(data, row.id) for data in row.images]
        kwargs = {"images": images, "images_kwargs": {"size": self.size}} if images else {}
        out = self.processor(text=[text], return_tensors="pt", **kwargs)
        ids, grid = out["input_ids"][0].tolist(), out.get("image_grid_thw")
        expected = 0 if grid is None else int((grid.prod(-1) // self.merge_size**2).sum())
        if ids.count(self.image_token_id) != expected:
            raise ConfigError(
                f"row {row.id}: {ids.count(self.image_token_id)} image tokens for {len(images)} images of {expected} "
                "merged patches: its placeholders do not match its images"
            )
        return Encoded(text, ids, images, out.get("pixel_values"), grid)

    def length(self, row: Row) -> int:
        """Tokens of a row's prompt."""
        return len(self.token_ids(row))

    def token_ids(self, row: Row) -> list[int]:
        """`encode(row).token_ids`, from the images' headers: nothing is decoded or resized."""
        if not self.has_vision:
            return self.encode(row).token_ids
        text = self.processor.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
        ids, counts = [], iter([self._image_tokens(data, row.id) for data in row.images])
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += [token] * (next(counts, 0) if token == self.image_token_id else 1)
        return ids

    def _image_tokens(self, data: bytes, row_id: str) -> int:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        width, height = size_of(data, row_id)
        factor = self.processor.image_processor.patch_size * self.merge_size
        edges = self.size["shortest_edge"], self.size["longest_edge"]
        h, w = smart_resize(height, width, factor=factor, min_pixels=edges[0], max_pixels=edges[1])
        return h * w // factor**2

    def engine_prompt(self, encoded: Encoded) -> dict[str, Any]:
        """The prompt as vLLM takes it."""
        if not encoded.images:
            return {"prompt_token_ids": encoded.token_ids}
        return {"prompt": encoded.text, "multi_modal_data": {"image": encoded.images}}

    def positions(self, token_ids: list[int], grid_thw: Tensor | None) -> Tensor:
        """Rotary positions [3, T] of one sequence (time, height, width); plain counting for text-only models."""
        return mrope_positions(tuple(token_ids), _grid(grid_thw), self.image_token_id, self.merge_size)


def mrope_positions(
    token_ids: tuple[int, ...], grid: tuple[tuple[int, int, int], ...], image_token_id: int | None, merge_size: int
) -> Tensor:
    """Multimodal rotary positions [3, T] of Qwen2-VL (arXiv 2409.12191, section 2.1), still images only.

    Text counts up by one on all three axes; an image's tokens share a start and add their merged row and column; the
    text after it goes on from the largest position used plus one.
    """
    positions = torch.empty(3, len(token_ids), dtype=torch.long)
    at = cursor = 0
    for start, (t, h, w) in zip(_runs(token_ids, image_token_id, grid, merge_size), grid, strict=True):
        text = torch.arange(start - at) + cursor
        positions[:, at:start] = text
        cursor += start - at
        h, w = h // merge_size, w // merge_size
        axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        size = t * h * w
        positions[:, start : start + size] = torch.stack([a.reshape(-1) for a in axes]) + cursor
        cursor += max(h, w)
        at = start + size
    positions[:, at:] = torch.arange(len(token_ids) - at) + cursor
    return positions


def _runs(ids: tuple[int, ...], image_token_id: int | None, grid: tuple[Any, ...], merge_size: int) -> list[int]:
    """Where each image's tokens begin."""
    starts, at = [], 0
    for t, h, w in grid:
        at = ids.index(image_token_id, at)
        starts.append(at)
        at += t * h * w // merge_size**2
    return starts


def _grid(grid_thw: Tensor | None) -> tuple[tuple[int, int, int], ...]:
    return () if grid_thw is None else tuple((int(t), int(h), int(w)) for t, h, w in grid_thw.tolist())


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


@lru_cache(maxsize=8)
def dummy_image(patch_dim: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """Smallest image there is, (pixels [merge^2, patch_dim], grid [1, 3]): ranks without images run the tower on it.

    ZeRO-3 gathers parameters by collectives, so a rank that skipped the vision tower would leave the others waiting.
    """
    return torch.zeros(merge_size**2, patch_dim), torch.tensor([[1, merge_size, merge_size]])
