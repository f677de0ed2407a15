"""Scores of benchmarks, by hand and by enumeration."""

import json
from itertools import combinations

import pytest

from trainer.hardware.model_shapes import known_as
from trainer.observe.scores import (
    ScoredProblem,
    confidence_interval,
    majority_accuracy,
    pass_at_k,
    score_benchmarks,
    score_problems,
    scores_table,
)


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_one(n, correct):
    outcomes = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        draws = list(combinations(outcomes, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_majority_decides_and_a_tie_is_shared():
    assert majority_accuracy([("7", 1.0), ("8", 0.0), ("7", 1.0), (None, 0.0)]) == 1.0
    assert majority_accuracy([("7", 1.0), ("8", 0.0), ("8", 0.0)]) == 0.0
    assert majority_accuracy([("7", 1.0), ("8", 0.0), (None, 0.0), (None, 0.0)]) == 0.5
    assert majority_accuracy([(None, 0.0)] * 3) == 0.0


def test_intervals_are_wilson_s_or_student_s_with_two_problems_more():
    # Wilson 1927, as statsmodels' proportion_confint gives it
    wilson = confidence_interval([1.0] * 7 + [0.0] * 3)
    assert wilson == pytest.approx((0.396778, 0.892209), abs=1e-5)
    assert confidence_interval([1.0] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    # 18 problems of variance 1/12 about 1/2; Student's t of 17 degrees of freedom is 2.110 by its table
    low, high = confidence_interval([0.25, 0.75] * 8)
    assert low == pytest.approx(0.5 - 2.110 * (1 / 12 / 18) ** 0.5, abs=1e-3) and high == pytest.approx(
        1 - low
    )


def test_a_prompt_that_was_too_long_counts_as_wrong():
    rows = [
        ScoredProblem("set/a", [("7", 1.0), ("7", 1.0)], tokens=30, truncated=0),
        ScoredProblem("set/b", [("7", 1.0), ("9", 0.0)], tokens=50, truncated=1),
        ScoredProblem("set/b", [(None, 0.0)] * 2, asked=False),
        ScoredProblem("gsm8k", [(None, 0.0), ("1", 0.0)], tokens=10, truncated=0),
    ]
    found = score_benchmarks(rows)
    assert list(found) == ["set", "gsm8k"] and "categories" not in found["gsm8k"]
    whole = found["set"]
    assert (whole["problems"], whole["too_long"], whole["accuracy"]) == (3, 1, 0.5)
    assert (whole["pass@1"], whole["pass@2"], whole["maj@2"]) == (0.5, pytest.approx(2 / 3), 0.5)
    assert (whole["tokens"], whole["truncated"], whole["no_answer"]) == (20, 0.25, 0.0)
    assert whole["categories"]["a"]["accuracy"] == 1.0 and whole["categories"]["b"]["accuracy"] == 0.25
    text = scores_table(found, "").splitlines()
    assert text[0].startswith("| benchmark | problems | accuracy | 95% | pass@1 | pass@2 | maj@2 |")
    assert [line.split("|")[1].strip() for line in text[2:]] == ["set", "- a", "- b", "gsm8k"]
    assert all(line.count("|") == text[0].count("|") for line in text)


def test_what_is_published_by_a_judge_says_so():
    found = score_benchmarks([ScoredProblem("mathvista/x", [("7", 1.0)])])
    assert "rules (published: a judge)" in scores_table(found, "") and "judge big" in scores_table(
        found, "big"
    )
    assert "@" not in scores_table(found, ""), "one completion has no pass@k"
    assert score_problems([ScoredProblem("a", [("7", 1.0)] * 3)])["pass@3"] == 1.0


def test_what_the_authors_published_stands_beside_ours():
    base = "Qwen/Qwen2.5-VL-7B-Instruct"
    figures = score_benchmarks(
        [ScoredProblem("mathvista/x", [("7", 1.0)]), ScoredProblem("gsm8k", [("7", 1.0)])], base
    )
    head, first, last = (
        scores_table(figures, "").splitlines()[::2][:2] + scores_table(figures, "").splitlines()[-1:]
    )
    assert f"published ({base})" in head and "| 68.2% |" in first and "68.2%" not in last


def test_a_trained_model_is_known_by_its_shape(tmp_path):
    published = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
    sizes = {"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    kind = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(published | sizes | kind))
    assert known_as(str(tmp_path)) == known_as("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert known_as(str(tmp_path / "none")) == ""
