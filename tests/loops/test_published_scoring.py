"""Benchmarks asked and scored as published, end to end: Ray, an engine, graders, the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from data_prep.write.shards import write_dataset
from tests.conftest import make_rows
from tests.loops.jobs import ROOT
from trainer import config as c
from trainer.rewards import published

CHOICES = ["red", "green", "blue", "black"]
ABOUT = {
    "mathvista/choice": {"question_type": "multi_choice", "answer_type": "text", "choices": CHOICES},
    "mathvista/float": {"question_type": "free_form", "answer_type": "float", "precision": 1.0},
    "mathvision/algebra": {"options": CHOICES},
    "mmmu-pro/art": {"options": CHOICES},
    "math-500/algebra": {},
}


def rows():
    """Ten rows of each benchmark, whose pictures are the demo's."""
    made = list(make_rows("test", 10 * len(ABOUT)))
    for number, row in enumerate(made):
        source = list(ABOUT)[number % len(ABOUT)]
        free = source in ("mathvista/float", "math-500/algebra")
        answer, kind = ("1.2", "number") if free else ("B", "letter")
        yield replace(row, source=source, answer=answer, answer_type=kind, extra=ABOUT[source])


@pytest.mark.long
def test_a_benchmark_is_asked_and_scored_as_published(small_config, tmp_path):
    write_dataset(tmp_path / "data", "published", {"test": rows()}, {})
    config = replace(
        small_config,
        placement=replace(small_config.placement, workers_per_node=1),
        algorithm=replace(small_config.algorithm, kl_coef=0.0),
        checkpoint=replace(small_config.checkpoint, every_steps=0),
        data=replace(small_config.data, path=str(tmp_path / "data"), split="test", system_prompt="published"),
        rewards=replace(small_config.rewards, answer="any"),
        evaluation=c.Evaluation(
            benchmarks=True, pass_rate_samples=2, temperature=1.0, scoring="published", samples_per_prompt=1
        ),
    )
    (tmp_path / "run.yaml").write_text(c.dump(config))
    command = [sys.executable, "-m", "trainer.loops.pass_rate", "--config", str(tmp_path / "run.yaml")]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "pass_rates.jsonl").read_text().splitlines()]
    assert len(lines) == 50 and all(len(line["answers"]) == 2 for line in lines)
    scored = [line.get("published") for line in lines]
    assert sum(one is not None for one in scored) == 40, "math-500 has no rules of its own"
    assert all(len(one) == 2 for one in scored if one is not None)

    found = json.loads((folder / "benchmarks.json").read_text())
    assert (found["scoring"], found["system_prompt"], found["answer"]) == ("published", "published", "any")
    by_rules = {name: one.get("by_published_rules") for name, one in found["benchmarks"].items()}
    assert by_rules.keys() == {source.partition("/")[0] for source in ABOUT}
    assert by_rules["math-500"] is None
    assert {name for name, value in by_rules.items() if value is not None} <= published.SCORERS.keys()
    for name in published.SCORERS:
        pairs = zip(rows(), lines, strict=True)
        means = [sum(line["published"]) / 2 for row, line in pairs if row.source.startswith(f"{name}/")]
        assert by_rules[name] == pytest.approx(sum(means) / len(means)), name
    assert by_rules["mmmu-pro"] > 0.1, "where no choice is named its script draws one of four"
    table = (folder / "benchmarks.md").read_text()
    assert "the benchmark's prompt" in table and f"{by_rules['mmmu-pro']:.1%}" in table
