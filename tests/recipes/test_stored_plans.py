"""`plan --json` prints what it printed when the answer was stored, byte for byte.

Where a recipe, a price or a constant of the plan changes on purpose, `python -m
tests.recipes.test_stored_plans` writes the answers anew: their difference belongs into the same change.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import pytest

from recipes.commands import cli
from tests.recipes.desk import bare_desk

STORED = Path(__file__).with_name("stored_plans")
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
BIG = "grpo-qwen2.5-vl-72b-mathv60k"
GROUP = ("--set", "sample.nodes=4", "--set", "fleet.workers=only", "--target", "skypilot-runpod")
ANSWERS = {
    "seven": (SEVEN,),
    "within_limits": (SEVEN, "--target", "skypilot-aws", "--deadline", "60h", "--budget", "1000"),
    "no_limit_kept": (SEVEN, "--target", "skypilot-runpod", "--deadline", "10m"),
    "second_group": ("grpo-qwen2.5-vl-3b-mathv60k", *GROUP),
    "does_not_fit": (BIG, "--set", "cluster.nodes=1"),
    "supervised": ("sft-qwen2.5-14b-full", "--target", "slurm"),
    "card_check": ("gpu-check", "--target", "skypilot-runpod"),
    "server": ("serve", "--target", "skypilot"),
    "here": ("demo",),
}


def answer(name: str) -> str:
    """What `plan` prints for programs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["plan", *ANSWERS[name], "--json"])
    return out.getvalue()


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_for_programs_is_the_stored_one(name, monkeypatch, tmp_path):
    bare_desk(monkeypatch, tmp_path)
    assert answer(name) == (STORED / f"{name}.json").read_text()


def test_no_answer_is_stored_that_nobody_asks_for():
    assert {path.stem for path in STORED.iterdir()} == set(ANSWERS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch:
        bare_desk(patch, Path(empty))
        for name in ANSWERS:
            (STORED / f"{name}.json").write_text(answer(name))
