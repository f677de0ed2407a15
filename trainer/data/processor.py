"""Turns a row into what policy and engine read: chat text, token ids with expanded placeholders,
pixels, positions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trainer.config import ConfigError, Model, RunConfig
from trainer.data.schema import LEARNED, Row, content_text
from trainer.hardware import architectures
from trainer.images.decoding import decode_image, image_size
from trainer.storage import hub
from trainer.system.errors import StorageError
from trainer.turns.calls import with_tools

VISION_TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
"""Fields of a model's configuration that name a vision token."""
VISION_PAD = "<|vision_pad|>"
PATCHES = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "image_mean", "image_std")
"""Settings of an image processor that two models must share to read the same pixel values."""
LIST_BYTES_PER_TOKEN = 36
THINK = "<think>"
"""Opens the reasoning; chat templates of models that always reason write it."""
THINK_END = "</think>"
EMPTY_THINK = f"\n{THINK_END}\n\n"
"""Ends a reasoning that has just been opened, as templates of the Qwen3 family write it."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt as the policy reads it."""

    token_ids: list[int]
    """Image placeholders expanded to one id per merged patch."""
    pixel_values: Tensor | None
    """[patches, channels * temporal * patch * patch] float32."""
    grid_thw: Tensor | None
    """[images, 3]: patches in time, height and width."""

    @property
    def size_bytes(self) -> int:
        """Memory of the prompt."""
        pixels = 0 if self.pixel_values is None else self.pixel_values.nbytes
        return LIST_BYTES_PER_TOKEN * len(self.token_ids) + pixels


@dataclass(frozen=True)
class EngineRequest:
    """One prompt as the engine reads it."""

    token_ids: list[int]
    """Token ids that the policy reads, and that the engine must expand the prompt to."""
    inputs: dict[str, Any]
    """vLLM's prompt; holds the decoded images."""
    pixel_bytes: int
    """Memory of its images once the engine's processor has cut them into patches of float32."""
    images: int = 0
    """Number of images."""


class Prompter:
    """Encodes rows with the model's own processor. Images are resized nowhere else. Raises ConfigError if the
    model path holds no processor or tokenizer, StorageError if the hub does not answer."""

    def __init__(self, model: Model, tools: Sequence[dict[str, Any]] = ()) -> None:
        """tools: JSON schemas of the functions that every prompt offers."""
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        self._model = model
        self.tools = list(tools)
        config = RunConfig(model=model)
        revision = {"revision": model.revision} if model.revision else {}
        try:
            # raises StorageError if the hub is away, not if the model is missing
            hub.model_file(config, "config.json")
            self.hf_config: Any = AutoConfig.from_pretrained(model.path, **revision)
            self.has_vision = getattr(self.hf_config, "vision_config", None) is not None
            loader = AutoProcessor if self.has_vision else AutoTokenizer
            self.processor: Any = loader.from_pretrained(model.path, **revision)
        except StorageError:
            raise
        except Exception as error:
            hub.check_hub_answers(config)  # raises StorageError: transformers has no error for an outage
            if isinstance(error, OSError | ValueError):
                raise ConfigError(f"model.path {model.path}: {str(error).splitlines()[0]}") from None
            raise
        architectures.check_architecture(model.path, self.hf_config.to_dict())
        self.architecture = architectures.FAMILIES[self.hf_config.model_type]
        self.tokenizer: Any = self.processor.tokenizer if self.has_vision else self.processor
        self.size = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
        self.image_token_id = getattr(self.hf_config, "image_token_id", None)
        self.merge_size = self.hf_config.vision_config.spatial_merge_size if self.has_vision else 1

    @property
    def eos_token_id(self) -> int:
        """Token id that ends a completion."""
        return self.tokenizer.eos_token_id

    @cached_property
    def opening(self) -> str:
        """What the chat template writes of the reply itself: `<think>` for models that always reason, else
        nothing."""
        text = [{"type": "text", "text": "?"}]
        (chat,) = self.texts([[{"role": "user", "content": text}]])
        return THINK if chat.rstrip().endswith(THINK) else ""

    def banned_token_ids(self) -> list[int]:
        """Ids that must never be sampled: vision tokens, and ids at the vocabulary's end that stand for no
        token. A sampled image token breaks training ("image features and image tokens do not match")."""
        text_config = getattr(self.hf_config, "text_config", None) or self.hf_config
        named = [getattr(self.hf_config, name, None) for name in VISION_TOKENS]
        ids = set(range(len(self.tokenizer), text_config.vocab_size))
        ids |= {number for number in named if isinstance(number, int)}
        if VISION_PAD in self.tokenizer.get_vocab():
            ids.add(self.tokenizer.convert_tokens_to_ids(VISION_PAD))
        return sorted(ids)

    def end_token_ids(self) -> set[int]:
        """Ids at which the engine stops: the tokenizer's end token, and those of the model's generation
        configuration, which vLLM adds whatever it is asked for."""
        from transformers import GenerationConfig

        revision: dict[str, Any] = {"revision": self._model.revision} if self._model.revision else {}
        try:
            listed = GenerationConfig.from_pretrained(self._model.path, **revision).eos_token_id
        except OSError:  # the model has none
            listed = None
        ends = set(listed) if isinstance(listed, list) else {listed}
        ends.discard(None)
        return ends | {self.eos_token_id}

    def reply_text(self, token_ids: list[int]) -> str:
        """The completion as text without special tokens, after what the chat template writes of it."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.opening + text

    def fingerprint(self) -> str:
        """sha256 over all that lengths depend on: tokenizer, chat templates, image processor, pixel
        limits, library."""
        parts = [
            self.tokenizer.backend_tokenizer.to_str(),
            self.tokenizer.chat_template,
            getattr(self.processor, "chat_template", None),
            self.processor.image_processor.to_dict() if self.has_vision else {},
            self.size,
            self.image_token_id,
            version("transformers"),
        ]
        if self.tools:
            parts.append(self.tools)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def vocabulary(self) -> str:
        """sha256 over what token ids mean and how text becomes them: the tokenizer without templates and
        padding."""
        tokenizer_json = json.loads(self.tokenizer.backend_tokenizer.to_str())
        added = [[token["id"], token["content"]] for token in tokenizer_json["added_tokens"]]
        parts = [
            tokenizer_json["model"],
            added,
            tokenizer_json["normalizer"],
            tokenizer_json["pre_tokenizer"],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def patches(self) -> dict[str, Any]:
        """What decides how an image of a given size becomes pixel values and tokens."""
        settings = self.processor.image_processor.to_dict() if self.has_vision else {}
        return {"image_token": self.image_token_id} | {name: settings.get(name) for name in PATCHES}

    def check_longest(self, tokens: int) -> None:
        """Raises ConfigError if the model has fewer than `tokens` positions, as vLLM will."""
        text = self.hf_config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        scale = 1.0
        if rope.get("rope_type") in ("linear", "dynamic"):
            scale = rope.get("factor") or 1.0
        most = int(text.max_position_embeddings * scale)
        if tokens > most:
            raise ConfigError(
                f"data.prompt_max_tokens and rollout.max_tokens are {tokens} together, "
                f"and the model reads {most}: lower one of them"
            )

    def texts(self, chats: Sequence[list[dict[str, Any]]]) -> list[str]:
        """Text of the chats by the model's template, up to the start of the completion."""
        wanted: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if self.tools and self.offers_tools:
            wanted["tools"] = self.tools
        elif self.tools:
            chats = [with_tools(messages, self.tools) for messages in chats]
        if self.has_vision:
            return self.processor.apply_chat_template(list(chats), **wanted)
        plain = [[{**m, "content": content_text(m["content"])} for m in messages] for messages in chats]
        return self.tokenizer.apply_chat_template(plain, **wanted)

    @property
    def chat_template(self) -> str:
        """The model's own, in Jinja."""
        return str(getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template)

    @property
    def offers_tools(self) -> bool:
        """Whether the chat template asks for calls in JSON. That of Qwen2.5-VL knows no tools, and that of
        Qwen3.5 asks for another form: there the prompt has the words of Qwen2.5's."""
        return "<function-name>" in self.chat_template

    @property
    def writes_results(self) -> bool:
        """Whether the chat template writes what stands around a tool's result."""
        return "<tool_response>" in self.chat_template

    def encode(self, row: Row, images: list[Image.Image] | None = None) -> EncodedPrompt:
        """One row by chat template, tokenizer and image processor, up to the start of the completion.
        `images` are the row's if they are decoded already. Raises ConfigError if one does not decode or if
        the placeholders do not match the images."""
        if not self.has_vision:
            return EncodedPrompt(self.token_ids(row), None, None)
        (text,) = self.texts([row.messages])
        if images is None:
            images = [decode_image(data, row.id) for data in row.images]
        kwargs = {"images": images, "images_kwargs": {"size": self.size}} if images else {}
        out = self.processor(text=[text], return_tensors="pt", **kwargs)
        ids = out["input_ids"][0].tolist()
        grid = out.get("image_grid_thw")
        expected = 0 if grid is None else int((grid.prod(-1) // self.merge_size**2).sum())
        if ids.count(self.image_token_id) != expected:
            raise ConfigError(
                f"row {row.id}: {ids.count(self.image_token_id)} image tokens for {len(images)} images "
                f"of {expected} merged patches: its placeholders do not match its images"
            )
        return EncodedPrompt(ids, out.get("pixel_values"), grid)

    def token_ids(self, row: Row) -> list[int]:
        """`encode(...).token_ids`, from the images' headers: nothing is decoded or resized."""
        if row.images and not self.has_vision:
            raise ConfigError(f"row {row.id} has images but the model reads text only: choose a VL model")
        (text,) = self.texts([row.messages])
        ids = []
        counts = iter([self._image_tokens(data, row.id) for data in row.images])
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += [token] * (next(counts, 0) if token == self.image_token_id else 1)
        return ids

    def solution_text(self, solution: str) -> str:
        """What a reply has of a solution. Where the chat template opens the reasoning, the tag does not come
        twice, and a solution that never closes it stands behind an empty reasoning."""
        if not self.opening or not solution:
            return solution
        if THINK_END not in solution:
            return EMPTY_THINK + solution.removeprefix(self.opening).lstrip()
        return solution.removeprefix(self.opening).lstrip() if solution.startswith(THINK) else solution

    def solution_ids(self, row: Row) -> list[int]:
        """Token ids of a row's solution, with the end token, which supervised training learns."""
        text = self.solution_text(row.solution)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.eos_token_id]

    def learned_positions(self, row: Row) -> list[int]:
        """Positions in `token_ids(row)` that supervised training learns besides the solution. They are those
        of the earlier replies that the row names, each with its end token. Raises ConfigError if the template
        writes a reply differently when others follow."""
        turns = row.extra.get(LEARNED)
        if not turns:
            return []

        (text,) = self.texts([row.messages])
        texts_before = self.texts([row.messages[:turn] for turn in turns])
        spans = []
        for turn, before in zip(turns, texts_before, strict=True):
            end = text.find(self.tokenizer.eos_token, len(before))
            if not text.startswith(before) or end < 0:
                raise ConfigError(
                    f"row {row.id}: the chat template changes message {turn} when others follow: "
                    "without loss flags only the last reply is learned"
                )
            spans.append((len(before), end + len(self.tokenizer.eos_token)))

        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        image_tokens = iter([self._image_tokens(data, row.id) for data in row.images])
        positions = []
        position = 0
        for token, (start, end) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
            if any(first <= start and end <= last for first, last in spans):
                positions.append(position)
            position += next(image_tokens, 0) if token == self.image_token_id else 1
        return positions

    def lengths(
        self, chats: Sequence[list[dict[str, Any]]], images: Sequence[Sequence[bytes]], row_ids: Sequence[str]
    ) -> list[int]:
        """Number of tokens of each row's prompt, `len(token_ids(row))`, for many rows at once. Raises
        ConfigError as `token_ids` does."""
        if not self.has_vision and any(images):
            raise ConfigError("the dataset has images but the model reads text only: choose a VL model")
        if not chats:
            return []
        texts = self.tokenizer(self.texts(chats), add_special_tokens=False)["input_ids"]
        counts = []
        for ids, row_images, row_id in zip(texts, images, row_ids, strict=True):
            self.check_vision_tokens(ids, len(row_images), row_id)
            # A placeholder is one token of the text, and stands for all of the image's tokens.
            expanded = sum(self._image_tokens(data, row_id) - 1 for data in row_images)
            counts.append(len(ids) + expanded)
        return counts

    def check_vision_tokens(self, ids: Sequence[int], images: int, row_id: str) -> None:
        """Raises ConfigError that names a row whose text would be read as more images, or videos, than it
        has."""
        if not self.has_vision:
            return
        placeholders = ids.count(self.image_token_id)
        videos = ids.count(getattr(self.hf_config, "video_token_id", None))
        if placeholders != images or videos:
            raise ConfigError(
                f"row {row_id}: {placeholders} image tokens and {videos} video tokens in its text for "
                f"{images} images: a text that names such a token is read as one; prepare the data again, or "
                "leave it out"
            )

    @property
    def cell(self) -> int:
        """Pixels of each side of the square that one image token stands for."""
        return self.processor.image_processor.patch_size * self.merge_size

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that an image of these is resized to."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        height, width = smart_resize(
            height,
            width,
            factor=self.cell,
            min_pixels=self.size["shortest_edge"],
            max_pixels=self.size["longest_edge"],
        )
        return width, height

    def tokens_of_size(self, width: int, height: int) -> int:
        """Number of tokens of an image of this size."""
        width, height = self.seen_size(width, height)
        return height * width // self.cell**2

    def _image_tokens(self, data: bytes, row_id: str) -> int:
        return self.tokens_of_size(*image_size(data, row_id))

    def request(self, row: Row, images: list[Image.Image]) -> EngineRequest:
        """The prompt as the engine reads it, which resizes the decoded images by itself."""
        ids = self.token_ids(row)
        if not images:
            return EngineRequest(ids, {"prompt_token_ids": ids}, 0)
        (text,) = self.texts([row.messages])
        patch = self.processor.image_processor.patch_size
        values = 3 * self.processor.image_processor.temporal_patch_size * (patch * self.merge_size) ** 2
        pixels = 4 * values * sum(token == self.image_token_id for token in ids)
        return EngineRequest(
            ids, {"prompt": text, "multi_modal_data": {"image": images}}, pixels, len(images)
        )

    def positions(self, token_ids: list[int], grid_thw: Tensor | None) -> Tensor:
        """Rotary positions [3, T] (time, height, width) of one sequence; text-only models count up by one."""
        grid = () if grid_thw is None else tuple(map(tuple, grid_thw.tolist()))
        return mrope_positions(tuple(token_ids), grid, self.image_token_id, self.merge_size)


def mrope_positions(
    token_ids: tuple[int, ...],
    grid: tuple[tuple[int, int, int], ...],
    image_token_id: int | None,
    merge_size: int,
) -> Tensor:
    """Multimodal rotary positions [3, T] of Qwen2-VL (arXiv 2409.12191, section 2.1), for still images. Text
    counts up by one on all three axes. An image's tokens have one start, to which each adds its merged row
    and column. The text after an image continues from the largest position plus one."""
    positions = torch.empty(3, len(token_ids), dtype=torch.long)
    at = cursor = 0
    for start, (t, h, w) in zip(_runs(token_ids, image_token_id, grid, merge_size), grid, strict=True):
        text = torch.arange(start - at) + cursor
        positions[:, at:start] = text
        cursor += start - at
        h, w = h // merge_size, w // merge_size
        axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        size = t * h * w
        positions[:, start : start + size] = torch.stack(axes).reshape(3, size) + cursor
        cursor += max(h, w)
        at = start + size
    positions[:, at:] = torch.arange(len(token_ids) - at) + cursor
    return positions


def _runs(
    ids: tuple[int, ...], image_token_id: int | None, grid: tuple[Any, ...], merge_size: int
) -> list[int]:
    """Positions at which the tokens of each image start."""
    starts = []
    end = 0
    for t, h, w in grid:
        start = ids.index(image_token_id, end)
        starts.append(start)
        end = start + t * h * w // merge_size**2
    return starts


@lru_cache(maxsize=8)
def dummy_image(patch_dim: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """The smallest image, as (pixels [merge^2, patch_dim], grid [1, 3]), for ranks without images. ZeRO-3
    gathers parameters by collectives, so a rank that skipped the vision tower would leave the others
    waiting."""
    return torch.zeros(merge_size**2, patch_dim), torch.tensor([[1, merge_size, merge_size]])
