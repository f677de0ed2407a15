"""Whole runs of a tiny model on the device, as a node starts them. Values have no meaning: a test asserts
that a run ends and resumes, and that its ranks agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.nullgpu import counts, runs
from trainer import config as configuration

EAGER = "rollout.eager=true"
"""The engine compiles nothing: test_steps.py has a case that does."""


@pytest.mark.timeout(2400)
def test_a_run_under_ray_ends_and_resumes(tiny_model, mixed_dataset, tmp_path):
    config = runs.tiny(tiny_model, mixed_dataset, tmp_path / "run")
    config = configuration.override(config, [EAGER])
    first = runs.run(configuration.override(config, ["run.max_steps=1"]), tmp_path)
    assert first.code == 0, first.said[-6000:]
    (rank,) = first.ranks
    assert rank.total("launch", "LearnerPart.update") > 100
    again = runs.run(config, tmp_path)
    assert again.code == 0, again.said[-6000:]
    assert [line["step"] for line in again.metrics if "loss/total" in line] == [1, 2]


@pytest.mark.timeout(2400)
def test_steps_that_are_sampled_ahead(tiny_model, mixed_dataset, tmp_path):
    """Two ranks, each with an engine of its own; the next step's completions come of the weights before."""
    config = runs.tiny(tiny_model, mixed_dataset, tmp_path / "run")
    ahead = ["rollout.staleness=1", "run.max_steps=3"]
    config = configuration.override(config, [EAGER, "placement.workers_per_node=2", *ahead])
    done = runs.run(config, tmp_path, devices=2)
    assert done.code == 0, done.said[-6000:]
    assert [line["step"] for line in done.metrics if "loss/total" in line] == [1, 2, 3]
    assert len(done.ranks) == 2
    assert counts.differences(done.ranks) == []


SFT = {
    "all weights": (),
    "adapters": ("lora.rank=8",),
    "weights in 4 bits": ("lora.rank=8", "lora.qlora=true"),
}


@pytest.mark.parametrize("name", SFT)
@pytest.mark.timeout(2400)
def test_sft_by_torchrun(tiny_model, mixed_dataset, tmp_path, name):
    base = runs.tiny(tiny_model, mixed_dataset, tmp_path / "run")
    config = replace(base, method="sft", sft=configuration.SFT(batch_size=8, max_tokens=300))
    options = ["placement.workers_per_node=2", "algorithm.kl_coef=0", *SFT[name]]
    config = configuration.override(config, options)
    done = runs.run(config, tmp_path, loop="sft", devices=2, torchrun=True)
    assert done.code == 0, done.said[-6000:]
    assert [line["step"] for line in done.metrics if "sft/loss" in line] == [1, 2]
    assert len(done.ranks) == 2
    assert counts.differences(done.ranks) == []
