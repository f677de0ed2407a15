"""What a run that measures pass rates writes, without engine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from trainer.algorithm.traces import Outcome, completed_trace
from trainer.config import ConfigError
from trainer.loops.pass_rate import _whole_lines, row_records


def sample(row, text, finished=True):
    return completed_trace([1], [2], group=row, row=row, end="stop" if finished else "length", text=text)


def test_a_line_per_row_with_its_rate_and_the_shortest_correct_completion():
    samples = [
        sample(3, "<answer>\\boxed{7}</answer>"),
        sample(3, "7"),
        sample(3, "8"),
        sample(3, "", finished=False),
        sample(1, "no"),
    ]
    verdicts = ["correct", "correct", "wrong", "correct", "wrong"]
    outcomes = [Outcome(verdict, float(verdict == "correct"), 1.0, 1.0) for verdict in verdicts]
    assert row_records(samples, outcomes, {1: "a", 3: "b"}) == [
        {
            "id": "a",
            "pass_rate": 0.0,
            "samples": 1,
            "completion": "",
            "answers": [(None, 0.0)],
            "tokens": 1,
            "truncated": 0,
        },
        {
            "id": "b",
            "pass_rate": 0.75,
            "samples": 4,
            "completion": "7",
            "tokens": 4,
            "truncated": 1,
            "answers": [("7", 1.0), (None, 1.0), (None, 0.0), (None, 1.0)],
        },
    ]


def test_a_line_of_an_episode_has_what_came_before_the_last_reply():
    episode = replace(sample(3, "7"), dialog=("a call", "its result"))
    outcomes = [Outcome("correct", 1.0, 1.0, 1.0)] * 2
    (line,) = row_records([sample(3, "It is 7."), episode], outcomes, {3: "b"})
    assert (line["completion"], line["dialog"]) == ("7", ["a call", "its result"])
    (line,) = row_records([sample(3, "7"), sample(3, "8")], outcomes, {3: "b"})
    assert "dialog" not in line


def test_it_goes_on_behind_the_last_whole_block(tmp_path):
    run = SimpleNamespace(
        checkpoints=SimpleNamespace(storage=None),
        train_rows=[0, 2, 3, 4, 5],
        train_set=[SimpleNamespace(id=str(i)) for i in range(6)],
        config=SimpleNamespace(rows_per_step=2),
    )
    path = tmp_path / "pass_rates.jsonl"
    assert _whole_lines(run, path) == []  # ty: ignore[invalid-argument-type]
    written = [json.dumps({"id": i, "pass_rate": 1.0}) for i in "02345"]
    path.write_text("\n".join(written[:3]) + '\n{"id": "4", "pa')
    assert _whole_lines(run, path) == written[:2]  # ty: ignore[invalid-argument-type]
    assert path.read_text().splitlines() == written[:2]
    path.write_text("\n".join(written) + "\n")
    assert _whole_lines(run, path) == written  # ty: ignore[invalid-argument-type]
    path.write_text(written[1] + "\n")
    with pytest.raises(ConfigError, match="measured on other rows"):
        _whole_lines(run, path)  # ty: ignore[invalid-argument-type]
