"""Pass rates of episodes, end to end: Ray, an engine, a tool of a user's, the lines that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.loops.jobs import ROOT
from trainer import config as c
from trainer.config import ConfigError, override
from trainer.loops.pass_rate import measure_pass_rates

SHOWING = """
from trainer.turns.episode import Observation

class Showing:
    shows_images = True

    def answer(self, situation, replies):
        (picture,) = situation.pictures
        return Observation(f"{len(replies)}:", [picture.image.crop((0, 0, 20, 30)).resize((28, 56))])

    def score(self, situation, replies):
        return len(replies) / 4

class Silent(Showing):
    score = None
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pass_rates_and_benchmarks_are_of_episodes(small_config, picture_dataset, tmp_path):
    (tmp_path / "showing.py").write_text(SHOWING)
    asked = [f"data.path={picture_dataset}", "evaluation.pass_rate_samples=2", "rollout.max_tokens=800"]
    asked += ["turns.limit=3", "data.prompt_max_tokens=800", "placement.workers_per_node=1"]
    asked += ["algorithm.kl_coef=0", "checkpoint.every_steps=0", "data.max_samples=4"]

    def measured(name, *options):
        own = f"turns.environment={tmp_path}/showing.py:{name}"
        config = override(small_config, [*asked, own, f"run.dir={tmp_path / name}", *options])
        (tmp_path / "run.yaml").write_text(c.dump(config))
        command = [sys.executable, "-m", "trainer.loops.pass_rate", "--config", str(tmp_path / "run.yaml")]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)

    done = measured("Showing")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "Showing/pass_rates.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert {line["pass_rate"] for line in lines} <= {0.25, 0.375, 0.5, 0.625, 0.75}
    assert max(line["pass_rate"] for line in lines) > 0.25, "some have more than one reply"
    for line in lines:
        dialog = line.get("dialog", [])
        assert dialog[1::2] == ["1:", "2:"][: len(dialog) // 2]

    done = measured("Silent", "evaluation.benchmarks=true", "evaluation.temperature=1.0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "Silent/benchmarks.json").read_text())["samples"] == 2


def test_an_environment_that_scores_grades_no_benchmark(small_config, tmp_path):
    (tmp_path / "showing.py").write_text(SHOWING)
    asked = [f"turns.environment={tmp_path}/showing.py:Showing", "evaluation.benchmarks=true"]
    config = override(small_config, [*asked, "evaluation.pass_rate_samples=1"])
    with pytest.raises(ConfigError, match="Showing scores episodes itself"):
        measure_pass_rates(config, SimpleNamespace())  # ty: ignore[invalid-argument-type]
