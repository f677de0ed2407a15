"""Episodes of several turns on a real engine, and the policy that learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loops.jobs import Job
from tests.loops.test_resume import kill_in, placed, weights_of
from tests.turns.talking import teach
from trainer.config import override

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

TURNS = (
    "turns.environment=zoom",
    "turns.limit=3",
    "turns.image_pixels=3136",
    "data.prompt_max_tokens=800",
    "rollout.max_tokens=500",
    "algorithm.micro_batch_tokens=4000",
    "placement.workers_per_node=1",
)


@pytest.fixture(scope="session")
def talking_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model, which has learned to call `zoom`."""
    return teach(tiny_model, tmp_path_factory.mktemp("models") / "talking")


@pytest.fixture
def config(small_config, talking_model, picture_dataset):
    return override(small_config, [f"model.path={talking_model}", f"data.path={picture_dataset}", *TURNS])


def test_engine_and_policy_agree_on_episodes_with_shown_pictures(run_ranks, config):
    """Three pictures a dialog at most; order of arrival and batch decide nothing; limits have their ends."""
    result = run_ranks("episodes", config)[0]
    traces = result["traces"]
    assert result["apart"] < 1e-4 and result["packed"] < 1e-4
    assert max(trace["image_runs"] for trace in traces) == 3, "the row's picture, and two that were shown"
    assert {trace["end"] for trace in traces} == {"stop", "turns"}
    for trace in traces:
        _, behind, learned, sampled = trace["lengths"]
        assert learned == sampled <= behind and (learned < behind) == bool(trace["dialog"])
        assert trace["replies"] == [*trace["dialog"][::2], trace["text"]]
        assert len(trace["replies"]) == trace["segments"] <= 3
        assert trace["observed"].count("<tool_response>") == len(trace["dialog"]) // 2
        assert (trace["end"] == "turns") == (len(trace["replies"]) == 3 and "<tool_call>" in trace["text"])
    observations = []
    for trace in traces:
        observations += trace["dialog"][1::2]
    kinds = {said.partition(",")[0].partition(":")[0] for said in observations}
    assert kinds == {"Picture 1", "Error"}
    assert result["again"] == traces
    assert any(trace["end"] == "length" for trace in result["short"])
    assert all(trace["lengths"][1] <= 130 for trace in result["short"])


def test_a_run_learns_from_episodes_and_killed_it_is_the_same_run(config, tmp_path):
    """From the configuration through rollout, update, log and resume; the killed one replays its log."""
    about = ["run.max_steps=3", "checkpoint.export_hf=end", "logging.samples_per_step=4"]
    config = override(config, about)
    undisturbed = Job(placed(config, tmp_path / "undisturbed"), tmp_path / "undisturbed").start()
    assert undisturbed.wait(900) == 0, undisturbed.tail()
    for line in undisturbed.metrics():
        assert 1 < line["turns/replies_mean"] <= 3 and line["turns/observed_tokens_mean"] > 0
        assert line["mismatch/logprob_abs_mean"] < 1e-5
        assert 0 < line["turns/limit_fraction"] <= line["tokens/truncated_fraction"]
    assert any(line["grad/norm"] > 0 for line in undisturbed.metrics())
    samples = (undisturbed.run_dir / "samples.jsonl").read_text().splitlines()
    shown = [json.loads(line)["completion"] for line in samples]
    assert any("[observed] Picture 1, box [" in completion for completion in shown)

    job = Job(placed(config, tmp_path / "killed"), tmp_path / "killed")
    kill_in(job, "update", 2)
    assert job.start().wait(900) == 0, job.tail()
    assert "are replayed" in job.log.read_text()
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)
