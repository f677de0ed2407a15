"""What a server's chat template writes of a dialog with tools: the tokens of training."""

from __future__ import annotations

import json

import pytest

from tests.data.qwen import prompter
from trainer.config import Model, RunConfig, Turns
from trainer.data.processor import Prompter
from trainer.data.tool_template import tool_template
from trainer.sampling.serve import tool_words
from trainer.turns.calls import as_result
from trainer.turns.environments import tools_of

TOOLS = tools_of(Turns(environment="zoom"))
BOX = {"box": [0, 0, 20, 28]}
CALL = f"I look.\n<tool_call>\n{json.dumps({'name': 'zoom', 'arguments': BOX})}\n</tool_call>"
CALLS = [{"type": "function", "function": {"name": "zoom", "arguments": BOX}}]
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": [{"type": "text", "text": "Which?"}, {"type": "image"}]}
SHOWN = [{"type": "text", "text": "Picture 1:"}, {"type": "image"}]


@pytest.mark.parametrize("system", [[], [SYSTEM], [SYSTEM | {"content": [{"type": "text", "text": "Be."}]}]])
def test_a_model_whose_template_knows_no_tools_is_asked_as_in_training(tiny_model, system):
    made = Prompter(Model(path=str(tiny_model), min_pixels=784), TOOLS)
    before, behind = as_result("Picture 1:")
    result = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": behind}]
    said = [{"role": "assistant", "content": CALL}, {"role": "user", "content": result}]
    (trained,) = made.texts([[*system, QUESTION, *said]])
    asked = [
        *system,
        QUESTION,
        {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "content": SHOWN},
    ]
    template = tool_template(made)
    wanted = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    assert made.processor.apply_chat_template(asked, tools=TOOLS, **wanted) == trained
    plain = made.processor.apply_chat_template([*system, QUESTION], **wanted)
    assert plain == Prompter(Model(path=str(tiny_model), min_pixels=784)).texts([[*system, QUESTION]])[0]


def test_a_server_with_our_template_is_told_that_images_stand_among_the_text(tiny_model, tmp_path):
    config = RunConfig(
        model=Model(path=str(tiny_model), min_pixels=784), turns=Turns(environment="zoom", image_pixels=3136)
    )
    words = tool_words(config, tmp_path)
    assert words[-4:-1] == ["--chat-template", f"{tmp_path}/tools.jinja", "--chat-template-content-format"]
    assert words[-1] == "openai"


def test_a_template_with_the_words_of_training_is_left_alone(tmp_path):
    assert tool_template(prompter(tmp_path, "qwen2.5")) == ""


def test_a_template_with_other_words_offers_those_of_training(tmp_path):
    """That of Qwen3.5 asks for calls in tags, and shows results itself."""
    prompter(tmp_path, "qwen3.5", kind="qwen3")
    made = Prompter(Model(path=str(tmp_path)), TOOLS)
    result = {"role": "tool", "content": "Picture 1:"}
    question = {"role": "user", "content": "Which?"}
    (trained,) = made.texts([[SYSTEM, question, {"role": "assistant", "content": CALL}, result]])
    asked = [SYSTEM, question, {"role": "assistant", "content": "I look.", "tool_calls": CALLS}, result]
    wanted = {"tokenize": False, "add_generation_prompt": True, "chat_template": tool_template(made)}
    assert made.tokenizer.apply_chat_template(asked, tools=TOOLS, **wanted) == trained
