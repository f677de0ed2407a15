"""Prompt lengths without the processor, against the real processor."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from data_prep.checks.tokens import text_token_counter
from data_prep.ingest.images import image_tokens
from tests.data_prep import raw
from trainer.config import ConfigError


def chats():
    sizes = [(84, 84), (640, 480), (1600, 900), (29, 500)]
    for i, size in enumerate(sizes):
        content = [{"type": "text", "text": f"What is {i} + {i}?\nÜber ∠ABC"}, {"type": "image"}]
        yield (
            [{"role": "system", "content": "Think."}, {"role": "user", "content": content}],
            [raw.drawing(i, *size)],
        )
    yield [{"role": "user", "content": "No image at all?"}], []
    both = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    yield [{"role": "user", "content": both}], [raw.drawing(8, 100, 200), raw.drawing(9, 300, 200)]


def test_lengths_are_those_of_the_processor(tiny_model):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_model)
    low, high = 4 * 28 * 28, 1280 * 28 * 28
    messages = [chat for chat, _ in chats()]
    text = text_token_counter(str(tiny_model))(messages)
    for (chat, images), tokens in zip(chats(), text, strict=True):
        images = [Image.open(io.BytesIO(raw.encoded(image))) for image in images]
        rendered = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        size = {"shortest_edge": low, "longest_edge": high}
        encoded = processor(
            text=[rendered], images=images or None, images_kwargs={"size": size} if images else {}
        )
        expected = len(encoded["input_ids"][0])
        ours = tokens - len(images) + sum(image_tokens(p.width, p.height, low, high) for p in images)
        assert ours == expected


def test_no_tokenizer_counts_no_text():
    assert text_token_counter("")([[{"role": "user", "content": "q"}]]) == [0]


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer ") as caught:
        text_token_counter(str(tmp_path / "none"))
    assert "\n" not in str(caught.value)
