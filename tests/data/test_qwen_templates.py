"""Qwen's own chat templates, as published: what the trainer reads of them."""

from __future__ import annotations

import pytest

from tests.data.qwen import prompter
from trainer.config import ConfigError
from trainer.data.schema import LEARNED, Row

USER = [{"role": "user", "content": "What is 1 + 1?"}]
KINDS = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3.5": "qwen3"}
TAIL = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
ADDED = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
TEXTS = {"qwen2.5": ADDED + TAIL, "qwen3": TAIL, "qwen3.5": f"{TAIL}<think>\n"}
WORKED = "<think> Two. </think><answer> $\\boxed{2}$ </answer>"


@pytest.fixture(scope="module")
def prompters(tmp_path_factory):
    made = {}
    for template, kind in KINDS.items():
        made[template] = prompter(tmp_path_factory.mktemp(template), template, kind=kind)
    return made


def row(messages, solution="", learned=()):
    return Row("r1", "s", messages, [], "2", "number", solution, {LEARNED: list(learned)} if learned else {})


@pytest.mark.parametrize("template", KINDS)
def test_a_prompt_is_what_the_template_writes(prompters, template):
    one = prompters[template]
    assert one.texts([USER]) == [TEXTS[template]]
    system = [{"role": "system", "content": "Be brief."}, *USER]
    assert one.texts([system])[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    ids = one.token_ids(row(USER))
    assert one.tokenizer.decode(ids) == TEXTS[template]
    assert one.lengths([USER, system], [[], []], ["a", "b"]) == [len(ids), len(one.token_ids(row(system)))]


def test_templates_that_open_the_reasoning_are_told_apart(prompters):
    opened = {template: one.opening for template, one in prompters.items()}
    assert opened == {"qwen2.5": "", "qwen3": "", "qwen3.5": "<think>"}


@pytest.mark.parametrize("template", KINDS)
def test_a_solution_and_its_prompt_are_one_reply(prompters, template):
    """A worked solution stands behind what the template opens, once."""
    one = prompters[template]
    asked = row(USER, WORKED)
    whole = one.tokenizer.decode(one.token_ids(asked) + one.solution_ids(asked))
    assert whole.count("<think>") == 1 and whole.endswith("</answer><|im_end|>")
    bare = row(USER, "It is 2.")
    reply = one.tokenizer.decode(one.token_ids(bare) + one.solution_ids(bare)).removeprefix(TEXTS[template])
    opens = TEXTS[template].endswith("<think>\n")
    assert reply == ("\n</think>\n\nIt is 2.<|im_end|>" if opens else "It is 2.<|im_end|>")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
RESPONSE = "<tool_response>\n2\n</tool_response>"


@pytest.mark.parametrize("template", KINDS)
def test_tool_calls_that_stand_in_a_chat_s_texts_reach_the_model_unchanged(prompters, template):
    one = prompters[template]
    said = [*USER, {"role": "assistant", "content": CALL}, {"role": "user", "content": RESPONSE}]
    text = one.texts([said])[0]
    assert f"{CALL}<|im_end|>\n<|im_start|>user\n{RESPONSE}<|im_end|>" in text
    ids = one.tokenizer(f"{CALL}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert one.reply_text(ids) == one.opening + CALL


REASONED = "<think>\nTwo.\n</think>\n\nIt is 2."


@pytest.mark.parametrize(
    ("template", "reply", "learned"),
    [
        ("qwen2.5", "It is 2.", "It is 2."),
        ("qwen2.5", REASONED, REASONED),
        ("qwen3", "It is 2.", "It is 2."),
        ("qwen3", REASONED, "It is 2."),
        ("qwen3.5", "It is 2.", None),
        ("qwen3.5", REASONED, None),
    ],
)
def test_of_earlier_replies_what_the_template_keeps_is_learned(prompters, template, reply, learned):
    """None: the template opens the reasoning of a last reply, and leaves it out once others follow."""
    one = prompters[template]
    chat = [*USER, {"role": "assistant", "content": reply}, {"role": "user", "content": "Sure?"}]
    said = row(chat, "Yes.", [1])
    if learned is None:
        with pytest.raises(ConfigError, match="row r1: the chat template changes message 1"):
            one.learned_positions(said)
        return
    ids = one.token_ids(said)
    assert one.tokenizer.decode([ids[i] for i in one.learned_positions(said)]) == f"{learned}<|im_end|>"
