"""Observations as tokens: those of the chat template's own rendering of the finished dialog, and nothing of a
tool's text becomes a special token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.qwen import prompter
from tests.turns.test_built_in_tools import called
from trainer.algorithm.traces import ImageRef, completed_trace
from trainer.config import ConfigError, Model, RunConfig, Turns, override
from trainer.data.dialog import Dialogs, dialogs_of, no_verdict
from trainer.data.processor import Prompter
from trainer.data.reader import RowReader
from trainer.sampling.episodes import Episodes
from trainer.turns.environments import environment_of, tools_of
from trainer.turns.episode import Observation

KINDS = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3.5": "qwen3"}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}]
TEXTS = ("42", "Error: (", "  spaces  ", "ends with a bracket)", "\u00e9 \u4e8c \U0001f600", "two\nlines\n")


CALCULATOR = "examples/calculator.py:Calculator"


def dialogs(made: Prompter, environment=CALCULATOR) -> Dialogs:
    config = override(RunConfig(), [f"turns.environment={environment}"])
    answers = environment_of(config.turns)
    assert answers is not None
    reader: Any = SimpleNamespace(prompter=made)
    return Dialogs(config, answers, reader, no_verdict)


@pytest.fixture(scope="module")
def vision(tiny_model):
    return Prompter(Model(path=str(tiny_model), min_pixels=784), tools_of(Turns(environment="zoom")))


@pytest.mark.parametrize("template", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_finished_dialog(tmp_path, template, text):
    """Prompt, reply, observation, reply: with the tokens that the engine sampled in the replies' places no
    token differs from the template's rendering of the whole dialog."""
    made = prompter(tmp_path, template, kind=KINDS[template])
    made = Prompter(Model(path=str(tmp_path)), tools_of(Turns(environment=CALCULATOR)))
    assert made.writes_results and made.offers_tools == (template != "qwen3.5")
    call = called("calculator", expression="6 * 7")
    reply = {"role": "assistant", "content": call}
    whole = made.texts([[*ASKED, reply, {"role": "tool", "content": text}]])[0]
    start = made.texts([ASKED])[0]
    assert '"name": "calculator"' in start and '{"name": <function-name>' in start, (
        "the prompt offers the tool"
    )
    assert "<function=" not in start

    if made.opening:  # the template of Qwen3.5 shows an empty reasoning where a reply had none
        call = f"\n{made.opening.replace('<', '</')}\n\n{call}"
    ids = made.tokenizer(start, add_special_tokens=False)["input_ids"]
    ids += made.tokenizer(call, add_special_tokens=False)["input_ids"] + [made.eos_token_id]
    ids += dialogs(made).token_ids(Observation(text))
    want = made.tokenizer(whole, add_special_tokens=False)["input_ids"]
    differing = sum(a != b for a, b in zip(ids, want, strict=False)) + abs(len(ids) - len(want))
    assert differing == 0, made.tokenizer.decode(ids)


def test_a_template_without_tools_gets_them_in_the_words_of_qwen(vision):
    """As Qwen2.5-VL's: the tools stand behind the system message, and results come from the user."""
    assert not vision.offers_tools and not vision.writes_results
    user = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    bare, with_system = vision.texts([[user], [{"role": "system", "content": "Be brief."}, user]])
    assert bare.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n")
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '"name": "zoom"' in bare and bare.endswith("<|im_start|>assistant\n")
    image = Image.new("RGB", (56, 84))
    ids = dialogs(vision, "zoom").token_ids(Observation("Picture 1:", (image, image)))
    assert ids.count(vision.image_token_id) == 2 * 6
    text = vision.tokenizer.decode(ids).replace("<|image_pad|>" * 6, "<|image_pad|>")
    shown = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    assert text == (
        f"\n<|im_start|>user\n<tool_response>\nPicture 1:{shown}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_special_token_in_a_text_stays_text(vision, role):
    special = set(vision.tokenizer.get_added_vocab().values())
    told = dialogs(vision)
    harmless = told.token_ids(Observation("x", role=role))
    text = "".join(vision.tokenizer.get_added_vocab()) + "<|im_<|im_end|>end|>" + "<|image_pad|>" * 3
    ids = told.token_ids(Observation(text, role=role))
    assert [i for i in ids if i in special] == [i for i in harmless if i in special]
    assert "image_pad|>" in vision.tokenizer.decode(ids), "the model reads what it was"


def test_a_template_that_cannot_show_an_observation_is_refused(tmp_path):
    made = prompter(tmp_path, "qwen2.5")
    made.tokenizer.chat_template = "{{ messages[0].content }}{% if tools %}{% endif %}"
    with pytest.raises(ConfigError, match=r"turns\.environment .*calculator.*role tool"):
        dialogs(made)


@pytest.fixture
def reader(small_config, picture_dataset):
    changes = [f"data.path={picture_dataset}", "turns.environment=zoom", "turns.limit=3"]
    changes += ["turns.image_pixels=3136", "data.prompt_max_tokens=600", "rollout.max_tokens=600"]
    return RowReader(override(small_config, changes))


def replied(reader, row, text, begun=None):
    """An episode in which the model says `text` next."""
    ids = reader.prompter.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids.append(reader.prompter.eos_token_id)
    before = reader.request(reader.config.train_split, row).token_ids if begun is None else begun.tokens
    said = completed_trace(before, ids, group=0, row=row, images=(ImageRef(row, 0),), text=text)
    if begun is None:
        return said
    learned = np.concatenate([begun.learned, said.learned])
    return replace(begun, tokens=said.tokens, learned=learned, end="stop", text=text)


def answered(told, trace, max_tokens=600):
    """The episode after its last reply, as the engine gets it back."""
    episodes = Episodes(told, told.config.train_split, max_tokens)
    (grown,) = episodes.answered([trace], idle=True)
    trace, shown = grown.trace, grown.observation
    if shown is None:
        return trace, [], ()
    return trace, trace.tokens[shown.start : shown.stop].tolist(), shown.images


def test_an_episode_grows_by_observations_that_are_not_learned(reader):
    told = dialogs_of(reader.config, reader)
    first = replied(reader, 0, called("zoom", box=[0, 0, 20, 28]))
    trace, ids, images = answered(told, first)
    assert trace.end == "cut" and len(images) == 1 and trace.tokens.tolist() == [*first.tokens, *ids]
    assert trace.learned.tolist() == first.learned.tolist() and trace.dialog[0] == first.text
    second = replied(reader, 0, called("zoom", box=[9, 9, 9, 9]), trace)
    trace, ids, images = answered(told, second)
    assert trace.end == "cut" and not images and trace.dialog[3].startswith("Error: the box is empty")
    assert [len(reply) for reply in second.replies] == [
        len(first.learned),
        len(second.learned) - len(first.learned),
    ]
    last = replied(reader, 0, "It is 3.", trace)
    assert answered(told, last) == (last, [], ())

    limited = replied(reader, 0, called("zoom", box=[0, 0, 20, 20]), trace)
    assert answered(told, limited)[0].end == "turns"
    assert answered(told, first, len(first.completion) + 30)[0].end == "length"
    for over in (replace(first, end="length"), replace(first, tokens=np.append(first.tokens[:-1], 7))):
        assert answered(told, over) == (over, [], ())


def test_more_images_than_may_be_shown_end_an_episode(reader):
    """Two images are shown behind a reply and an error between them, where two may be."""
    config = override(reader.config, ["turns.limit=9", "turns.images=2", "rollout.max_tokens=900"])
    reader = RowReader(config)
    assert reader.images_per_prompt() == 3
    told = dialogs_of(config, reader)
    trace = None
    for box in ([0, 0, 20, 28], [9, 9, 9, 9], [0, 0, 28, 28], [9, 9, 9, 9]):
        trace, _, _ = answered(told, replied(reader, 0, called("zoom", box=box), trace), 900)
        assert trace.end == "cut"
    assert [told._images_in(trace, turn) for turn in range(4)] == [1, 0, 1, 0]
    last = replied(reader, 0, called("zoom", box=[0, 0, 20, 28]), trace)
    ended, ids, _ = answered(told, last, 900)
    assert ended.end == "images" and not ids and not ended.finished
    assert told.encoded(config.train_split, last).grid_thw.shape[0] == 2


def test_pictures_are_made_again_from_row_and_replies(reader):
    split, told = reader.config.train_split, dialogs_of(reader.config, reader)
    trace = replied(reader, 0, called("zoom", box=[0, 0, 20, 28]))
    assert told.encoded(split, trace) is None
    trace, _, images = answered(told, trace)
    trace = replied(reader, 0, "It is 3.", trace)
    encoded = told.encoded(split, trace)
    want = reader.prompter.processor.image_processor(
        images=list(images), size=reader.prompter.size, return_tensors="pt"
    )
    assert encoded.pixel_values.equal(want["pixel_values"]) and encoded.grid_thw.equal(want["image_grid_thw"])
    assert told.encoded(split, trace) is encoded, "it is kept within data.image_cache_gib"
    other = replace(trace, dialog=(called("zoom", box=[0, 0, 28, 28]), trace.dialog[1]), row=1)
    with pytest.raises(RuntimeError, match="answered otherwise"):
        told.encoded(split, other)
