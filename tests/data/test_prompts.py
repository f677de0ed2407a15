"""What a run asks with: the rows' words, none, ours, a benchmark's own, a text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from data_prep.write.shards import write_dataset
from recipes.presets import resolve
from recipes.recipe import recipe_files
from tests.conftest import make_rows
from trainer.config import ConfigError, Rewards
from trainer.data import lengths, prompts
from trainer.data.dataset import Dataset
from trainer.data.processor import Prompter
from trainer.data.prompt_form import VARIES, PromptForm
from trainer.data.prompts import PromptWording
from trainer.data.schema import LEARNED, SYSTEM_PROMPT, TEXT_SYSTEM_PROMPT
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.scorer import Scorer

PICTURE = [
    {"role": "system", "content": "theirs"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
]
PLAIN = [{"role": "user", "content": "How many?"}]


def test_every_form_has_a_message_that_asks_for_it():
    assert set(prompts.OURS) == set(FORMS)
    assert FORMS["block"].credit(SYSTEM_PROMPT.partition("For example: ")[2]) == 1.0
    assert FORMS["final"].answer(prompts.OURS["final"].partition("example: ")[2])[0] == "12"


@pytest.mark.parametrize(
    ("system_prompt", "answer", "messages", "told"),
    [
        ("rows", "boxed", PICTURE, "theirs"),
        ("none", "boxed", PICTURE, None),
        ("ours", "block", PICTURE, SYSTEM_PROMPT),
        ("ours", "block", PLAIN, TEXT_SYSTEM_PROMPT),
        ("ours", "boxed", PLAIN, prompts.STEPS_AND_BOX),
        ("Say it.", "whole", PICTURE, "Say it."),
    ],
)
def test_the_system_message(system_prompt, answer, messages, told):
    asked = PromptWording(system_prompt, answer).asked(messages, "mine")
    assert [m["content"] for m in asked if m["role"] == "system"] == ([told] if told else [])
    assert asked[-1] == messages[-1]


def test_a_benchmark_is_asked_in_its_own_words():
    published = PromptWording("published", "any")
    (vision,) = published.asked(PICTURE, "mathvision/algebra")
    assert [part["type"] for part in vision["content"]] == ["text", "image", "text"]
    assert vision["content"][0]["text"] == prompts.BEFORE["mathvision"]
    (pro,) = published.asked(PICTURE, "mmmu-pro/Physics")
    assert pro["content"][-1]["text"].endswith("before answering.")
    (math,) = published.asked(PLAIN, "math-500/algebra")
    assert math["content"] == f"How many?\n{prompts.STEPS_AND_BOX}"
    assert published.asked(PICTURE, "mathvista/FigureQA") == PICTURE[1:]


def test_rows_and_their_lengths_are_those_that_are_asked(small_config, tmp_path):
    """A turn that is learned is found where the system message is gone."""
    (row,) = make_rows("train", 1)
    turns = [row.messages[0], {"role": "assistant", "content": "4"}, {"role": "user", "content": "And now?"}]
    row = dataclasses.replace(row, messages=[PICTURE[0], *turns], extra={LEARNED: [2]})
    write_dataset(tmp_path / "d", "d", {"train": [row]}, {})
    prompter = Prompter(small_config.model)
    seen = {}
    for system_prompt in ("rows", "none", "Think hard about it."):
        dataset = Dataset(tmp_path / "d", prompting=PromptWording(system_prompt))
        (turn,) = dataset[0].extra[LEARNED]
        assert dataset[0].messages[turn]["content"] == "4"
        seen[system_prompt] = len(prompter.token_ids(dataset[0]))
        assert lengths.measure_lengths(prompter, dataset, 0, 1, False)[0, 0] == seen[system_prompt]
    assert len(set(seen.values())) == 3


def test_what_the_template_opens_is_part_of_what_is_graded(small_config):
    prompter = Prompter(small_config.model)
    assert prompter.opening == ""
    thinking = Prompter(small_config.model)
    template = thinking.processor.chat_template
    thinking.processor.chat_template = template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert thinking.opening == "<think>"
    reply = "It is not $\\boxed{3}$.</think><answer>$\\boxed{2}$</answer>"
    text = thinking.reply_text(thinking.tokenizer(reply)["input_ids"])
    assert text == f"<think>{reply}"
    (graded,) = Scorer(Rewards(workers=1)).score([text], ["2"], ["number"])
    assert graded.verdict == "correct" and graded.format == 1.0


@pytest.mark.parametrize("solution", ["<think>\n1+1=2</think><answer>2</answer>", "2", ""])
def test_a_solution_does_not_open_the_reasoning_again(small_config, tmp_path, solution):
    (row,) = make_rows("train", 1)
    row = dataclasses.replace(row, solution=solution)
    write_dataset(tmp_path / "d", "d", {"train": [row]}, {})
    prompter = Prompter(small_config.model)
    for opens in (False, True):
        if opens:
            prompter = Prompter(small_config.model)
            prompter.processor.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
        learned = prompter.solution_ids(row)
        whole = prompter.tokenizer.decode(prompter.token_ids(row) + learned)
        assert whole.count("<think>") == max(int(opens), solution.count("<think>"))
        assert whole.endswith(solution.removeprefix("<think>\n") + prompter.tokenizer.eos_token)
        closed = solution and (opens or "<think>" in solution)
        assert whole.count("</think>") == int(bool(closed)), "what is opened is closed once"
        if opens and solution == "2":
            assert whole.endswith("<think>\n\n</think>\n\n2" + prompter.tokenizer.eos_token)
        counted = lengths.measure_lengths(prompter, Dataset(tmp_path / "d"), 0, 1, True)[0, 1]
        assert counted == (len(learned) if solution else 0)


def test_a_file_of_a_system_message_is_read_at_the_desk(tmp_path):
    (tmp_path / "p.txt").write_text("Reply with = and: the number.\n")
    _, (given,) = recipe_files.expand_paths("demo", [f"data.system_prompt=@{tmp_path}/p.txt"])
    assert json.loads(given.partition("=")[2]) == "Reply with = and: the number."
    config = resolve("demo", [given]).config
    assert config.data.system_prompt == "Reply with = and: the number."
    with pytest.raises(ConfigError, match="name a text file"):
        recipe_files.expand_paths("demo", [f"data.system_prompt=@{tmp_path}/none.txt"])


IMAGE = {"type": "image"}


def chat(system, *content):
    turns = [{"role": "user", "content": list(content)}]
    return [{"role": "system", "content": system}, *turns] if system else turns


def words(text):
    return {"type": "text", "text": text}


def test_what_rows_have_in_common_is_recorded():
    mine = "Say the number."
    assert PromptForm.of([chat(mine, words("how many"), IMAGE)] * 3) == PromptForm(mine, "last")
    assert PromptForm.of([chat("", IMAGE, words("how many")), chat("", words("1+1"))]) == PromptForm(
        "", "first"
    )
    mixed = [chat(mine, IMAGE, words("a")), chat(mine, words("a"), IMAGE)]
    assert PromptForm.of(mixed) == PromptForm(mine, VARIES)
    assert PromptForm.of([chat(mine, words("a")), chat("other", words("a"))]) is None


def test_a_benchmark_s_row_is_asked_as_the_run_s_rows_were(tmp_path, small_config):
    PromptForm("Say the number.", "last").write(tmp_path)
    config = replace(
        small_config,
        model=replace(small_config.model, path=str(tmp_path)),
        evaluation=replace(small_config.evaluation, benchmarks=True),
    )
    row = chat(SYSTEM_PROMPT, IMAGE, words("how many"))
    asked = PromptWording.of(config).asked(row, "mathvista/IconQA")
    assert asked == chat("Say the number.", words("how many"), IMAGE)
    amid = chat("", words("a"), IMAGE, words("b"))
    assert PromptForm("", "first").ask(amid) == amid, "text that speaks of its image stays around it"
    # training goes on as its rows are, and the authors' prompt is theirs
    training = replace(config, evaluation=small_config.evaluation)
    assert PromptWording.of(training).asked(row, "mine") == row
    published = replace(config, data=replace(config.data, system_prompt="published"))
    assert PromptWording.of(published).asked(row, "mathvista")[0]["content"] == [IMAGE, words("how many")]
