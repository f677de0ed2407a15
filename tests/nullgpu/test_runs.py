"""Whole runs of a tiny model on the device, as a node starts them. Values have no meaning: a test asserts
that a run ends and resumes, and that its ranks agree."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass, replace

import pytest

from tests.nullgpu import build, counts, null_device, runs
from tests.nullgpu.null_device import PYTHON
from trainer import config as configuration

EAGER = "rollout.eager=true"
"""The engine compiles nothing: test_steps.py has a case that does."""


@dataclass(frozen=True)
class Recipe:
    """A recipe as it runs here."""

    name: str
    family: str = "qwen2_5_vl"
    ranks: int = 1
    options: tuple[str, ...] = ()
    not_zero: str = "time/step_s"
    """Metric of the last step that shows what is special about the recipe."""
    there: str = "time/step_s"
    """The same, where its value comes of the device and means nothing."""


ZOOM = '<tool_call>\n{"name": "zoom", "arguments": {"box": [0, 0, 28, 28]}}\n</tool_call>'
RECIPES = {
    "carried over": Recipe(
        "grpo-qwen2.5-vl-3b-mathv60k",
        options=("rollout.staleness=1", "rollout.tokens_per_step=32", "run.max_steps=3"),
        not_zero="rollout/carried_fraction",
    ),
    "zoom": Recipe("grpo-qwen2.5-vl-7b-zoom", ranks=2, not_zero="turns/observed_tokens_mean"),
    "qwen3.5 with graphs": Recipe("grpo-qwen3.5-0.8b-mathv60k", "qwen3_5"),
    "distilled": Recipe("opd-qwen2.5-vl-7b-from-72b-mathv60k", ranks=2, there="teacher/kl"),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.timeout(2400)
def test_two_steps_of_a_recipe(family_model, mixed_dataset, tmp_path, monkeypatch, record_property, name):
    """With its CUDA graphs, under Ray, at the true vocabulary."""
    case = RECIPES[name]
    model = runs.of_true_vocabulary(family_model(case.family), tmp_path / "model")
    options = list(case.options)
    if name == "zoom":
        monkeypatch.setenv("NULLGPU_REPLY", ZOOM)
        options.append("rollout.max_tokens=600")
    if name == "distilled":
        options += [f"algorithm.teacher={model}", "algorithm.teacher_revision="]
    config = runs.of_recipe(case.name, model, mixed_dataset, tmp_path / "run", case.ranks, options)
    done = runs.run(config, tmp_path, devices=case.ranks, timeout_s=2000)
    assert done.code == 0, done.said[-6000:]
    steps = [line for line in done.metrics if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, config.run.max_steps + 1))
    assert steps[1][case.not_zero] and case.there in steps[1]
    assert counts.differences(done.ranks) == []
    record_property("phases of rank 0", counts.by_phase(done.ranks[0]))


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


@pytest.mark.timeout(2400)
def test_a_run_fed_by_a_worker(tiny_model, mixed_dataset, tmp_path, monkeypatch):
    """The trainer on one card, the worker on another at a true vocabulary, and a bucket between them."""
    model = runs.of_true_vocabulary(tiny_model, tmp_path / "model")
    config = runs.tiny(model, mixed_dataset, tmp_path / "run")
    bucket = tmp_path / "bucket"
    fed = ["fleet.workers=only", f"checkpoint.remote={bucket}", "run.id=fed"]
    config = configuration.override(config, fed)
    monkeypatch.setenv("SPOTRL_FLEET_KEY", "a secret of the tests, long enough")
    monkeypatch.setenv("SPOTRL_METADATA", "off")
    command = [PYTHON, "-m", "trainer.fleet.worker", "--run", f"{bucket}/fed", "--name", "w", "--poll", "0.5"]
    log = tmp_path / "worker.log"
    with log.open("w") as out:
        worker = subprocess.Popen(
            list(map(str, command)),
            cwd=build.ROOT,
            env=null_device.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            done = runs.run(config, tmp_path)
            assert done.code == 0, done.said[-4000:] + log.read_text()[-4000:]
            with contextlib.suppress(subprocess.TimeoutExpired):  # its log says more
                worker.wait(600)
            assert worker.poll() == 0, log.read_text()[-4000:]
        finally:
            if worker.poll() is None:
                worker.kill()
    assert [line["step"] for line in done.metrics if "loss/total" in line] == [1, 2]
    assert done.metrics[-1]["fleet/units"] > 0


SFT = {
    "all weights": (),
    "adapters": ("lora.rank=8",),
    "weights in 4 bits": ("lora.rank=8", "lora.qlora=true"),
}


@pytest.mark.parametrize("name", SFT)
@pytest.mark.timeout(2400)
def test_sft_on_two_cards(tiny_model, mixed_dataset, tmp_path, name):
    base = runs.tiny(tiny_model, mixed_dataset, tmp_path / "run")
    config = replace(base, method="sft", sft=configuration.SFT(batch_size=8, max_tokens=300))
    options = ["placement.workers_per_node=2", "algorithm.kl_coef=0", *SFT[name]]
    config = configuration.override(config, options)
    done = runs.run(config, tmp_path, loop="sft", devices=2)
    assert done.code == 0, done.said[-6000:]
    assert [line["step"] for line in done.metrics if "sft/loss" in line] == [1, 2]
    assert len(done.ranks) == 2
    assert counts.differences(done.ranks) == []
