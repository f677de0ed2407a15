import pytest

from trainer.rewards.grading.extraction import boxed_contents, final_answer, format_reward, unbox


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer>$\\boxed{5}$</answer>", "5"),
        ("<think>a</think>\n<answer> \\boxed{\\frac{1}{2}} </answer>", "\\frac{1}{2}"),
        ("<think>\\boxed{4}</think><answer>\\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{5}", "5"),  # cut after the box
        ("<answer>\\boxed{5} so \\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{\\boxed{5}}</answer>", "5"),
        ("<answer>\\boxed {5}</answer>", "5"),
        ("<answer>\\fbox{5}</answer>", "5"),
        ("<answer>\\boxed{\\{1, 2\\}}</answer>", "\\{1, 2\\}"),
        ("<answer>\\boxed{4}</answer><answer>\\boxed{5}</answer>", "5"),
    ],
)
def test_last_box_of_the_answer_counts(text, answer):
    assert final_answer(text) == (answer, False)


@pytest.mark.parametrize("text", [
    "", "5", "\\boxed{5}", "<think>\\boxed{5}</think>", "<think><answer>\\boxed{5}</answer></think>",
    "<think>\\boxed{5}</think><answer>5</answer>", "<answer>\\boxed{5</answer>", "<answer>\\boxed</answer>",
    "<answer></answer>\\boxed{5}", "\0" * 100,
])  # fmt: skip
def test_no_complete_box_in_an_answer_block_is_no_answer(text):
    assert final_answer(text) == (None, False)


def test_different_boxes_are_a_hedge():
    assert final_answer("<answer>\\boxed{4} or \\boxed{5}</answer>") == ("5", True)


def test_boxes_survive_thousands_of_them():
    assert len(boxed_contents("\\boxed{1}" * 20_000)) == 20_000
    assert boxed_contents("\\boxed{" * 20_000) == []


@pytest.mark.parametrize(("gold", "content"), [
    ("$\\boxed{A}$", "A"), ("$5$", "5"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\$5", "\\$5"),
    ("$$", ""),
])  # fmt: skip
def test_unbox_takes_the_wrapping_off_a_gold_answer(gold, content):
    assert unbox(gold) == content


@pytest.mark.parametrize(("text", "reward"), [
    ("<think>a</think><answer>b</answer>", 1.0), ("<think>a</think>\n<answer>b</answer>\n", 1.0),
    ("<think>a\nb</think> <answer>c\nd</answer>", 1.0), ("<think>a</think> so <answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer> done", 0.0), ("Well <think>a</think><answer>b</answer>", 0.0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
    ("<think>a<answer>b</answer></think>", 0.0), ("<answer>b</answer><think>a</think>", 0.0),
    ("<think>a</think><answer>b", 0.0), ("<answer>b</answer>", 0.0), ("", 0.0),
])  # fmt: skip
def test_format_reward(text, reward):
    assert format_reward(text) == reward
