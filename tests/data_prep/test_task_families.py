"""reasoning-gym as a source: mixtures by weight, levels, splits, and which rows cannot be graded."""

import json
from collections import Counter

import pytest

from data_prep import commands
from data_prep.generate.families import Families, weights_of
from tests.task_packages import needed
from trainer.config import ConfigError
from trainer.data.dataset import Dataset
from trainer.data.schema import reference_of
from trainer.rewards import task_families

QUICK = ["--workers", "1", "--validation", "0.2"]


@pytest.fixture(scope="module", autouse=True)
def package():
    return needed()


@pytest.mark.long
def test_one_command_prepares_a_mixture(tmp_path):
    command = [
        "prepare",
        "reasoning-gym:chain_sum=3,countdown",
        "--rows",
        "80",
        "--difficulty",
        "1..3",
        *QUICK,
    ]
    assert commands.main([*command, "--out", str(tmp_path / "a")]) == 0
    train = list(Dataset(tmp_path / "a", "train"))
    rows = train + list(Dataset(tmp_path / "a", "validation"))
    assert len(rows) == 80 and 50 < len(train) < 75
    drawn = Counter(row.source for row in rows)
    assert drawn.keys() == {"reasoning-gym/chain_sum", "reasoning-gym/countdown"}
    assert 45 <= drawn["reasoning-gym/chain_sum"] <= 70
    for row in rows:
        assert row.answer_type == "task" and not row.images
        task = json.loads(row.reference)
        assert row.source == f"reasoning-gym/{task['family']}" and task["entry"]["answer"] == row.answer
        assert row.messages[-1]["content"] == task["entry"]["question"]
    assert {row.extra["difficulty"] for row in rows} == {1, 2, 3}

    assert commands.main([*command, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_a_shorter_set_is_the_start_of_a_longer_one():
    weights = {"chain_sum": 1.0, "gcd": 2.0}
    longer = list(Families(weights, 40, seed=3).rows())
    assert list(Families(weights, 15, seed=3).rows()) == longer[:15]
    assert list(Families(weights, 15, seed=4).rows()) != longer[:15]


def test_what_is_held_out_is_trained_on_by_no_seed():
    held = {
        row.messages[0]["content"]
        for row in Families({"gcd": 1.0}, 30, 1, validation=0.2, evaluation=True).rows()
    }
    assert len(held) == 30
    for seed in range(1, 4):
        for row in Families({"gcd": 1.0}, 200, seed, validation=0.2).rows():
            assert row.split == "validation" or row.messages[0]["content"] not in held


def test_levels_are_harder():
    easy, hard = (
        list(Families({"chain_sum": 1.0}, 40, difficulty=(level, level)).rows()) for level in (1, 5)
    )
    assert max(len(row.messages[0]["content"]) for row in easy) < max(
        len(row.messages[0]["content"]) for row in hard
    )
    assert {row.extra["difficulty"] for row in hard} == {5}


def test_a_family_without_levels_states_none():
    (row,) = Families({"gsm_symbolic": 1.0}, 1).rows()
    assert row.extra.keys() == {"task"}


def test_rows_that_no_verifier_can_grade_are_quarantined(tmp_path):
    # one compares tuples with what JSON makes of them, one takes any text without a certain word, and one
    # states no answer, but checks any
    mixture = "reasoning-gym:rearc,game_of_life_halting,graph_color,gcd=4"
    out = tmp_path / "out"
    assert (
        commands.main(["prepare", mixture, "--rows", "30", "--difficulty", "1", *QUICK, "--out", str(out)])
        == 0
    )
    lines = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    reasons = {line["source"]: line["detail"] for line in lines}
    assert "gives its own answer" in reasons["reasoning-gym/rearc"]
    assert "takes 'I do not know' for correct" in reasons["reasoning-gym/game_of_life_halting"]
    assert {row.source for row in Dataset(out, "train")} == {"reasoning-gym/gcd", "reasoning-gym/graph_color"}


@pytest.mark.long
def test_what_each_family_is_fit_for():
    """Every family makes rows that it grades, but for these. sokoban is left out: it draws for minutes."""
    refused = {}
    for family in sorted(
        task_families.load_families(task_families.family_packages()).DATASETS.keys()
        - {"composite", "sokoban"}
    ):
        try:
            for row in Families({family: 1.0}, 2, difficulty=(1, 1)).rows():
                if error := task_families.task_fault(reference_of(row.answer, row.extra)):
                    refused[family] = error.partition(" '")[0].partition(" (")[0]
        except ConfigError as error:
            refused[family] = str(error).partition(" (")[0]
    own, anything = "its family gives its own answer", "its family takes"
    assert refused == {
        "arc_agi": own,
        "rearc": own,
        "word_ladder": own,
        "game_of_life_halting": anything,
        "knight_swap": "reasoning-gym:knight_swap has no difficulty 1",
    }


def test_generated_images_stand_beside_it(tmp_path):
    command = [
        "prepare",
        "generated=0.5",
        "reasoning-gym:gcd",
        "--rows",
        "24",
        *QUICK,
        "--out",
        str(tmp_path),
    ]
    assert commands.main(command) == 0
    rows = list(Dataset(tmp_path, "train"))
    assert {row.answer_type == "task" for row in rows if not row.images} == {True}
    assert {row.answer_type == "task" for row in rows if row.images} == {False}
    assert all("difficulty" in row.extra for row in rows)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning-gym:chain_sun", "did you mean reasoning-gym:chain_sum?"),
        ("reasoning-gym:gcd=x", "a weight above 0"),
        ("reasoning-gym:gcd,gcd", "each family once"),
        ("reasoning-gym:", "write reasoning-gym:FAMILY"),
    ],
)
def test_what_is_refused(source, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        Families(weights_of(source), 10)


def test_more_rows_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match="different rows: ask for fewer"):
        list(Families({"chain_sum": 1.0}, 5000, difficulty=(1, 1)).rows())
