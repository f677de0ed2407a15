"""A run is evaluated under its own system message and with images where its rows had them."""

from dataclasses import replace

from trainer.data.prompt_form import VARIES, PromptForm
from trainer.data.prompts import PromptWording
from trainer.data.schema import SYSTEM_PROMPT

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
