"""Episodes of several turns on a real engine, and the policy that learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.test_openenv import MINE, Server
from tests.loops.fault_run import FaultRun, in_phase, placed
from tests.loops.jobs import Job
from tests.turns.talking import teach
from trainer.config import override

pytestmark = [pytest.mark.timeout(3000)]

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


SHOWING = """
import os, time
from trainer.turns.episode import Observation

class Showing:
    \"\"\"Shows a part of the picture for whatever is said, in a time that differs from call to call.\"\"\"

    shows_images = True

    def answer(self, situation, replies):
        time.sleep(os.urandom(1)[0] / 2000)
        (picture,) = situation.pictures
        size = 28 * (1 + len(replies[-1]) % 2), 56
        part = picture.image.crop((0, 0, 20 + len(replies), 30))
        return Observation(f"{len(replies)}:", [part.resize(size)])
"""


@pytest.mark.slow
def test_an_untrained_model_has_episodes_too(run_ranks, small_config, picture_dataset, tmp_path):
    """Slow tools of a user's, on a real engine: what comes back in any order gives the same tokens, and
    engine and policy agree on all of them."""
    (tmp_path / "showing.py").write_text(SHOWING)
    own = [f"turns.environment={tmp_path}/showing.py:Showing", f"data.path={picture_dataset}"]
    own.append("rollout.max_tokens=800")  # such a model ends a reply with one token of 500
    result = run_ranks("episodes", override(small_config, [*TURNS, *own]))[0]
    traces = result["traces"]
    assert result["apart"] < 1e-4 and result["packed"] < 1e-4
    assert max(trace["image_runs"] for trace in traces) == 3
    ends = {trace["end"] for trace in traces}
    assert ends == {"turns", "length", "stop"}, "stop: by an end token that is not the chat template's"
    assert result["again"] == traces
    assert result["norm"] > 0
    for trace in traces:
        assert trace["dialog"][1::2] == ["1:", "2:"][: len(trace["dialog"]) // 2]


@pytest.mark.long
def test_engine_and_policy_agree_on_episodes_with_shown_pictures(run_ranks, config):
    """Three pictures a dialog at most; order of arrival, batch and ranks decide nothing; limits have their
    ends."""
    result = run_ranks("episodes", config)[0]
    traces = result["traces"]
    assert result["apart"] < 1e-4 and result["packed"] < 1e-4
    assert max(trace["image_runs"] for trace in traces) == 3, "the row's picture, and two that were shown"
    ends = {trace["end"] for trace in traces}
    assert {"stop", "turns"} <= ends <= {"stop", "turns", "length"}
    for trace in traces:
        _, behind, learned, sampled = trace["lengths"]
        assert learned == sampled <= behind and (learned < behind) == bool(trace["dialog"])
        assert trace["replies"] == [*trace["dialog"][::2], trace["text"]]
        assert len(trace["replies"]) == trace["segments"] <= 3
        assert trace["observed"].count("<tool_response>") == len(trace["dialog"]) // 2
        if trace["end"] == "turns":  # a call within the reasoning is none, so the opposite need not hold
            assert len(trace["replies"]) == 3 and "<tool_call>" in trace["text"]
    observations = []
    for trace in traces:
        observations += trace["dialog"][1::2]
    kinds = {said.partition(",")[0].partition(":")[0] for said in observations}
    assert kinds == {"Picture 1", "Error"}
    assert result["again"] == traces
    for rank in run_ranks("episodes", override(config, ["placement.workers_per_node=2"])):
        assert rank["traces"] == traces == rank["again"] and rank["apart"] < 1e-4
        assert rank["norm"] == pytest.approx(result["norm"], rel=1e-4)
        assert rank["learned"] == pytest.approx(result["learned"], abs=2e-3)


@pytest.mark.long
def test_limits_have_their_ends_and_episodes_are_carried_over(run_ranks, config):
    """Carried over within replies and between them, by the same weights and without dice, they are the same
    episodes."""
    result = run_ranks("limited_episodes", config)[0]
    assert any(trace["end"] == "length" for trace in result["short"])
    assert all(trace["lengths"][1] <= 130 for trace in result["short"])
    assert any(trace["end"] == "images" for trace in result["few"])
    assert max(trace["image_runs"] for trace in result["few"]) == 2
    assert result["phases"] > 3 and result["apart"] < 1e-4
    for whole, pieces in zip(result["greedy"], result["pieces"], strict=True):
        assert pieces.pop("segments") >= whole.pop("segments")
        assert pieces == whole


@pytest.mark.long
def test_ranks_of_an_engine_get_what_tools_say_on_the_first(
    run_ranks, small_config, picture_dataset, tmp_path
):
    """Tensor parallelism over two ranks, and tools that take another time on every call."""
    (tmp_path / "showing.py").write_text(SHOWING)
    own = [f"turns.environment={tmp_path}/showing.py:Showing", f"data.path={picture_dataset}"]
    tp = ["rollout.tensor_parallel=2", "placement.workers_per_node=2", "rollout.max_tokens=800"]
    first, second = run_ranks("episodes", override(small_config, [*TURNS, *own, *tp]))
    assert first["traces"] == first["again"] and first["apart"] < 1e-4
    assert max(trace["image_runs"] for trace in first["traces"]) == 3


SLOW_ZOOM = """
import os, time
from pathlib import Path
from trainer.turns.zoom import Zoom

class Slow(Zoom):
    \"\"\"zoom, in a time that differs from call to call; a file says while it is at work.\"\"\"

    def __init__(self):
        super().__init__(3136)

    def answer(self, situation, replies):
        mark = Path("MARKS", str(os.getpid()))
        mark.touch()
        time.sleep(os.urandom(1)[0] / 1000)
        observation = super().answer(situation, replies)
        mark.unlink()
        return observation
"""


def runs(config, tmp_path, *about) -> tuple[Job, FaultRun]:
    """A run of three steps that was never disturbed, and the same one, which has not begun."""
    about = [*about, "run.max_steps=3", "checkpoint.export_hf=end", "logging.samples_per_step=16"]
    config = override(config, [*about, "optimizer.learning_rate=1e-5"])
    whole, struck = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed = Job(placed(config, whole), whole)
    assert undisturbed.start().wait(1500) == 0, undisturbed.tail()
    assert [line["step"] for line in undisturbed.metrics()] == [1, 2, 3]
    return undisturbed, FaultRun(placed(config, struck), struck)


STALE = "rollout.staleness=1", "algorithm.rollout_correction=truncate"


@pytest.mark.long
@pytest.mark.parametrize("stale", [(), STALE, (*STALE, "rollout.tokens_per_step=20")])
def test_a_run_learns_from_episodes_and_killed_it_is_the_same_run(config, tmp_path, stale):
    """From the configuration through rollout, update, log and resume. With older weights, and carried over
    from phase to phase, too."""
    undisturbed, killed = runs(config, tmp_path, *stale)
    for line in undisturbed.metrics():
        assert 1 < line["turns/replies_mean"] <= 3 and line["turns/observed_tokens_mean"] > 0
        assert stale or line["mismatch/logprob_abs_mean"] < 1e-5
        assert 0 < line["turns/limit_fraction"] <= line["tokens/truncated_fraction"]
        assert len(stale) < 3 or line["step"] == 1 or line["rollout/carried_fraction"] > 0.5
    assert any(line["grad/norm"] > 0 for line in undisturbed.metrics())
    samples = (undisturbed.run_dir / "samples.jsonl").read_text().splitlines()
    shown = [json.loads(line)["completion"] for line in samples]
    assert any("[observed] Picture 1, box [" in completion for completion in shown)

    killed.play([in_phase("rollout", 2), in_phase("update", 3)], undisturbed, floor=1)
    assert "are replayed" in killed.job.log.read_text()


@pytest.mark.long
def test_killed_in_a_call_of_a_slow_tool_it_is_the_same_run(config, tmp_path):
    """A step that was not logged is sampled again, to the bit: no result of a tool is taken sooner or later
    than at its engine step."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "slow.py").write_text(SLOW_ZOOM.replace("MARKS", str(marks)))
    own = f"turns.environment={tmp_path}/slow.py:Slow"
    undisturbed, killed = runs(config, tmp_path, own)
    job = killed.job.start()

    def in_a_call() -> bool:
        return job.in_phase("rollout", 2) and any(marks.iterdir())

    job.until(lambda: in_a_call() and job.frozen(in_a_call))
    job.kill()
    assert job.start().wait(900) == 0, job.tail()
    killed.is_like(undisturbed)


@pytest.mark.long
def test_a_run_learns_from_a_servers_episodes_and_rewards(config, tmp_path, request):
    """A server of OpenEnv's protocol that answers whatever is said, and ends an episode with its reward."""
    server = Server()
    request.addfinalizer(server.server.shutdown)
    (tmp_path / "mine.py").write_text(MINE.format(port=server.port))
    undisturbed, killed = runs(config, tmp_path, f"turns.environment={tmp_path}/mine.py:Words")
    for line in undisturbed.metrics():
        assert 1 < line["turns/replies_mean"] < 3 and line["turns/failed_fraction"] == 0
        assert 0 < line["reward/mean"] < 1 and line["mismatch/logprob_abs_mean"] < 1e-5
    assert any(line["grad/norm"] > 0 for line in undisturbed.metrics())
    for sample in map(json.loads, (undisturbed.run_dir / "samples.jsonl").read_text().splitlines()):
        assert (sample["reward"] >= 1) == ("boxed{3}" in sample["completion"])

    killed.play([in_phase("rollout", 2)], undisturbed, floor=1)
