"""Loss flags of a conversation's turns: what is kept of the turns, which tokens are learned, and their
logprobs."""

import json

import pytest
import torch

from data_prep.sources.forms import BadRecord, Form, flagged
from tests.data_prep import raw
from tests.families import VISION
from trainer.algorithm.batching import collate
from trainer.config import ConfigError, Model
from trainer.data.processor import Prompter
from trainer.data.schema import LEARNED, Row

IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
CHAT = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello, hello!", "loss": True},
    {"role": "user", "content": IMAGE},
    {"role": "assistant", "content": "A triangle.", "loss": False},
    {"role": "user", "content": "How many sides?"},
    {"role": "assistant", "content": "Three of them.", "weight": 1},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "No.", "loss": False},
]
SYSTEM = {"smollm2": ("You are a helpful AI assistant named SmolLM, trained by Hugging Face",)}
"""By family, where it is not Qwen2.5's."""


def row(messages, solution, learned, images):
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    return Row("r", "test", plain, images, "", "text", solution, {LEARNED: learned} if learned else {})


def parsed(chat):
    return Form("messages", {"chat": "messages"}, sft=True).parse({"messages": chat})


def test_turns_after_the_last_learned_one_go():
    for chat in (CHAT, json.dumps(CHAT)):
        found = parsed(chat)
        assert (len(found.messages), found.solution, found.extra) == (5, "Three of them.", {LEARNED: [1]})
    without = [{k: v for k, v in turn.items() if k not in ("loss", "weight")} for turn in CHAT]
    assert parsed(without).extra == {} and parsed(without).solution == "No."
    assert flagged(without) == (without, [])
    half = [without[0], without[1] | {"loss": True}, *without[2:]]
    assert flagged(half) == (half, [1]), "the last reply is learned unless it says otherwise"
    with pytest.raises(BadRecord, match="no_reply"):
        parsed([turn | {"loss": False} for turn in CHAT])


def segments(image_tokens, system="You are a helpful assistant."):
    """The conversation by hand: (text, whether it is learned). system: what the template says for itself."""
    start, end = "<|im_start|>", "<|im_end|>"
    image = "<|vision_start|>" + "<|image_pad|>" * image_tokens + "<|vision_end|>" if image_tokens else ""
    return [
        (
            (f"{start}system\n{system}{end}\n{start}user\nSay hello.{end}\n{start}assistant\n"),
            False,
        ),
        (f"Hello, hello!{end}", True),
        (f"\n{start}user\nWhat is this?{image}{end}\n{start}assistant\nA triangle.{end}\n", False),
        (f"{start}user\nHow many sides?{end}\n{start}assistant\n", False),
        (f"Three of them.{end}", True),
    ]


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2", pytest.param("smollm2", marks=pytest.mark.long)],
)
def test_the_mask_is_that_of_a_list_made_by_hand(family_model, family):
    vision = family in VISION
    side = 28 if family == "qwen2_5_vl" else 32
    prompter = Prompter(Model(path=str(family_model(family)), min_pixels=side * side))
    images = [raw.encoded(raw.drawing(0, 2 * side, 3 * side))] if vision else []
    chat = CHAT if vision else [*CHAT[:2], CHAT[2] | {"content": "What is this?"}, *CHAT[3:]]
    one = row(chat[:5], "Three of them.", [1], images)
    want = [
        (token, learned)
        for text, learned in segments(6 if vision else 0, *SYSTEM.get(family, ()))
        for token in prompter.tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    ids, learned = prompter.token_ids(one), set(prompter.learned_positions(one))
    found = [(token, at in learned) for at, token in enumerate(ids)]
    assert found + [(token, True) for token in prompter.solution_ids(one)] == want
    if vision:
        assert prompter.encode(one).token_ids == ids
    assert prompter.learned_positions(row(chat[:5], "x", [], images)) == []


def test_a_template_that_changes_earlier_replies_is_refused(tiny_model):
    prompter = Prompter(Model(path=str(tiny_model)))
    prompter.processor.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="changes message 1 when others follow"):
        prompter.learned_positions(row([CHAT[0], CHAT[1], CHAT[4]], "Three.", [1], []))


def test_logprobs_of_learned_turns_are_plain_transformers(tiny_model):
    """Two conversations packed into a row, with an image in the second."""
    from transformers import AutoModelForImageTextToText

    from trainer.learning.logprobs import LogprobModel
    from trainer.loops.sft import solution_trace

    prompter = Prompter(Model(path=str(tiny_model), min_pixels=784))
    rows = [
        row([CHAT[0], CHAT[1], CHAT[4]], "Three.", [1], []),
        row(CHAT[:5], "Three of them.", [1], [raw.encoded(raw.drawing(0, 56, 84))]),
    ]
    items = [solution_trace(prompter, i, r) for i, r in enumerate(rows)]
    batch = collate(items, lambda t: prompter.encode(rows[t.row]), prompter.positions)
    hf = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    want = []
    for t, r in zip(items, rows, strict=True):
        ids, encoded = torch.from_numpy(t.tokens).long()[None], prompter.encode(r)
        images = (
            {}
            if encoded.grid_thw is None
            else {
                "pixel_values": encoded.pixel_values,
                "image_grid_thw": encoded.grid_thw,
                "mm_token_type_ids": (ids == prompter.image_token_id).int(),
            }
        )
        with torch.no_grad():
            logp = hf(input_ids=ids, **images).logits[0, :-1].log_softmax(-1)
        picked = logp.gather(1, ids[0, 1:, None])[:, 0]
        want += picked[torch.from_numpy(t.learned).long() - 1]
    with torch.no_grad():
        found = LogprobModel(hf, [], 1.0, False)(batch)[0]
    assert len(found) == sum(len(t.learned) for t in items) > 20
    assert torch.allclose(found, torch.stack(want), atol=1e-5)
