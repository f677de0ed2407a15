"""The demo's pretrained model, SmolLM2-135M-Instruct: its template and tokens. Skipped where its package
cannot be fetched."""

from __future__ import annotations

import pytest

from examples.pretrained import arithmetic
from trainer.config import Model
from trainer.data.dataset import Dataset
from trainer.data.processor import Prompter
from trainer.data.prompts import PromptWording
from trainer.loops.sft import solution_trace
from trainer.rewards.grading.grader import grade

OWN_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
ASKED = "<|im_start|>system\n" + arithmetic.SYSTEM_PROMPT + "<|im_end|>\n"


def turns(row):
    """What a row's turns are in the model's template: an answered example, then the question."""
    _, asked, answered, question = (message["content"] for message in row.messages)
    texts = [("user", asked), ("assistant", answered), ("user", question)]
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in texts)
    return shown + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(family_model):
    return family_model("smollm2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("arithmetic")
    arithmetic.prepare(out, 24, 8, list(arithmetic.FAMILIES), 0)
    return out


def test_rows_are_asked_by_the_model_s_own_template(model, rows):
    prompter = Prompter(Model(path=str(model)))
    row = Dataset(rows)[0]
    assert prompter.texts([row.messages]) == [ASKED + turns(row)]
    # the template speaks for itself where no system message is left
    bare = Dataset(rows, prompting=PromptWording("none"))[0]
    assert prompter.texts([bare.messages]) == [OWN_SYSTEM + turns(row)]
    assert prompter.opening == ""
    ids = prompter.token_ids(row)
    assert prompter.tokenizer.decode(ids) == ASKED + turns(row)
    assert prompter.lengths([row.messages], [[]], [row.id]) == [len(ids)]


def test_every_row_follows_an_answered_question_of_its_family(rows):
    examples = {}
    for split in ("train", "test"):
        for row in Dataset(rows, split=split):
            _, asked, answered, question = (message["content"] for message in row.messages)
            assert answered.startswith(f"{asked} = ") and row.solution.startswith(f"{question} = ")
            assert question.split()[1] == asked.split()[1]
            examples.setdefault(row.source, set()).add(asked)
    assert len(examples) == len(arithmetic.FAMILIES)
    assert all(len(one) == 1 for one in examples.values())


def test_no_test_question_is_trained_on_either_way_round(tmp_path):
    arithmetic.prepare(tmp_path, 330, 96, list(arithmetic.FAMILIES), 0)
    asked = {}
    for split in ("train", "test"):
        questions = [row.messages[-1]["content"] for row in Dataset(tmp_path, split=split)]
        asked[split] = {tuple(sorted(question.split())) for question in questions}
    assert len(asked["train"]) == 330 and len(asked["test"]) == 96
    assert not asked["train"] & asked["test"]


def test_special_tokens_are_single_and_none_is_banned(model):
    prompter = Prompter(Model(path=str(model)))
    assert prompter.tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [prompter.eos_token_id]
    assert len(prompter.tokenizer) == prompter.hf_config.vocab_size == 49152
    assert prompter.banned_token_ids() == [] and not prompter.has_vision


def test_an_equation_is_learned_with_its_end_and_nothing_before(model, rows):
    prompter = Prompter(Model(path=str(model)))
    row = Dataset(rows)[0]
    trace = solution_trace(prompter, 0, row)
    learned = prompter.tokenizer.decode(trace.tokens[trace.learned])
    assert learned == f"{row.solution}<|im_end|>"
    assert trace.shared == len(prompter.token_ids(row)) == trace.learned[0]


def test_every_solution_is_graded_as_correct_and_a_false_equation_is_not(rows):
    for row in Dataset(rows):
        assert grade(row.solution, row.answer, row.answer_type, form="whole") == "correct"
        false = row.solution.replace("= ", "= 1")
        assert grade(false, row.answer, row.answer_type, form="whole") == "wrong"


def test_the_converted_model_is_the_one_that_was_fetched(model):
    """Greedy, it continues as a language model does: the weights are in their places."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = policy.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
