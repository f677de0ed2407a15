"""`up` asks a person before it spends much; a script, `--yes` and `--dry-run` are not asked."""

from __future__ import annotations

import builtins
import shlex
import sys

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import launching
from recipes.records import run_record
from trainer.system.exit_codes import EXIT_INTERRUPTED

UP = shlex.split("up grpo-qwen2.5-vl-7b-mathv60k --target skypilot-runpod --bucket s3://mine --run-id mine")
SMALL = ["up", "sft-qwen2.5-7b-lora", *UP[2:]]


@pytest.fixture
def terminal(bucket, monkeypatch, tmp_path):
    """A person at a terminal, who answers what stands in the list; what was asked is appended to it."""
    stand_in(tmp_path, monkeypatch, "sky", "exit 0")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answers: list[str] = []

    def answered(question):
        answers.append(question)
        return answers[0]

    monkeypatch.setattr(builtins, "input", answered)
    return answers


def test_a_run_that_costs_much_is_started_after_a_yes_alone(capsys, terminal, tmp_path):
    terminal.append("n")
    code, out, err = run(capsys, *UP)
    assert code == EXIT_INTERRUPTED and out.endswith("nothing was started\n"), err
    assert terminal[1] == (
        "likely $304 in 21.2 h on skypilot-runpod, at most $503 in nine of ten runs: start it? [y/N] "
    )
    assert not run_record.is_known("mine") and not (tmp_path / "calls").exists()
    terminal[:] = ["y"]
    assert run(capsys, *UP)[0] == 0 and len(terminal) == 2
    assert "sky" in (tmp_path / "calls").read_text()


def test_yes_a_small_run_and_a_script_are_not_asked(capsys, terminal, monkeypatch):
    assert run(capsys, *UP, "--yes")[0] == 0
    assert run(capsys, *SMALL[:-1], "small")[0] == 0
    assert run_record.load_record("small").planned_usd < launching.ASK_USD
    assert run(capsys, *UP[:-1], "shown", "--dry-run")[0] == 0
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert run(capsys, *UP[:-1], "script")[0] == 0
    assert terminal == []
