"""Counts the tokens of prompts as the processor does, without images, torch or the processor.

The model's tokenizer and chat template count the text, the resize formula counts images
(`images.image_tokens`), in squares of the side that the model's configuration says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data_prep.ingest.images import FACTOR
from trainer.config import ConfigError

Counter = Callable[[list[list[dict[str, Any]]]], list[int]]


def text_token_counter(model: str) -> Counter:
    """A function that counts the tokens of chats, with one for each image; it gives 0 without a model.

    Args:
        model: local directory or hub id with tokenizer and chat template, optionally `id@revision`.

    Raises ConfigError if the tokenizer cannot be loaded.
    """
    if not model:
        return lambda chats: [0] * len(chats)
    from transformers import AutoTokenizer

    tokenizer = _loaded(AutoTokenizer, model)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"--tokenizer {model} has no chat template: name an instruction-tuned model")
    bare = not _takes_parts(tokenizer)

    def count(chats: list[list[dict[str, Any]]]) -> list[int]:
        if not chats:
            return []
        texts = []
        for chat in chats:
            known = _plain(chat) if bare else chat
            texts.append(tokenizer.apply_chat_template(known, tokenize=False, add_generation_prompt=True))
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return count


def image_token_side(model: str) -> int:
    """Side in pixels of an image token of a model: its patches, merged. Without a model, or for one that
    reads text only, it is Qwen2.5-VL's.

    Raises ConfigError if the model's configuration cannot be loaded.
    """
    if not model:
        return FACTOR
    from transformers import AutoConfig

    vision = _loaded(AutoConfig, model).to_dict().get("vision_config")
    if not vision:
        return FACTOR
    try:
        return vision["patch_size"] * vision["spatial_merge_size"]
    except KeyError as error:
        raise ConfigError(f"--tokenizer {model}: its config.json has no {error.args[0]} of images") from None


def _loaded(kind: Any, model: str) -> Any:
    """What a class of transformers reads of a model. Raises ConfigError."""
    path, _, revision = model.partition("@")
    try:
        return kind.from_pretrained(path, **({"revision": revision} if revision else {}))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {model}: {str(error).splitlines()[0]}") from None


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the template accepts content as a list of parts, which that of a text-only model does not."""
    try:
        chat = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
        return "{" not in tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # jinja raises its own errors for templates that expect a string
        return False


def _plain(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = []
    for message in chat:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        plain.append({**message, "content": content})
    return plain
