import hashlib
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from examples.demo import shapes, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder)


def chat(example):
    content = [{"type": "text", "text": example.question}, {"type": "image"}]
    return [{"role": "system", "content": "Think."}, {"role": "user", "content": content}]


def test_weights_follow_from_the_seed_alone(tmp_path):
    def digest(name, seed):
        torch.manual_seed(len(name))
        folder = tiny_model.build(tmp_path / name, seed)
        files = sorted(folder.iterdir())
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

    first = digest("a", 3)
    again = digest("again", 3)
    other = digest("other", 4)
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "again", "other"]  # no staging folder is left


def test_building_leaves_torchs_random_state_and_replaces_what_was_there(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "stale").write_text("")
    before = torch.random.get_rng_state()
    tiny_model.build(tmp_path / "m")
    assert torch.equal(before, torch.random.get_rng_state())
    assert not (tmp_path / "m" / "stale").exists()


def test_the_chat_has_qwens_form(processor):
    assert isinstance(processor, Qwen2_5_VLProcessor)
    text = processor.apply_chat_template(chat(shapes.example(0, "train", 0)), add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nHow many circles are there?"
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    plain = processor.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert plain == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_the_tokenizer_keeps_any_text_and_is_short_on_ours(processor):
    tokenizer = processor.tokenizer
    for text in (
        "<think>3 circles</think><answer>$\\boxed{3}$</answer>",
        "Größe 60° → α≤β\n\n\t(x²)",
        "数学",
        "🙂 12,345",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(len(tokenizer(e.solution)["input_ids"]) for e in shapes.examples(5, "test", 100)) <= 24


def test_special_tokens_stand_behind_the_vocabulary_and_its_tail_is_padded(folder, processor):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    ids = processor.tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    )
    config: Any = model.config
    assert ids == sorted(ids) and None not in ids
    assert [config.vision_start_token_id, config.vision_end_token_id, config.image_token_id] == ids[3:]
    assert config.text_config.eos_token_id == processor.tokenizer.eos_token_id == ids[2]
    assert config.text_config.vocab_size % 64 == 0 and config.text_config.vocab_size > len(
        processor.tokenizer
    )
    assert model.generation_config.eos_token_id == [ids[2], ids[0]]


def test_answers_depend_on_the_image(folder, processor):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    logits = []
    for index in (0, 4):  # both ask for circles
        example = shapes.example(0, "train", index)
        text = processor.apply_chat_template(chat(example), add_generation_prompt=True)
        inputs = processor(text=[text], images=[example.image], return_tensors="pt")
        placeholders = int((inputs["input_ids"] == model.config.image_token_id).sum())
        assert placeholders == int(inputs["image_grid_thw"].prod()) // 4 == 9
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_sizes_are_what_they_are_called(folder, tmp_path):
    def parameters(folder):
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
        tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
        return sum(p.numel() for p in model.parameters()) / 1e6, tied

    size, tied = parameters(folder)
    assert 0.5 < size < 4 and tied
    size, tied = parameters(tiny_model.build(tmp_path / "medium", 0, "medium"))
    assert 30 < size < 60 and not tied
