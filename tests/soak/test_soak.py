"""The short soak: deep models on rows of real shapes, a completion of 3,000 tokens beside short ones, killed
once.

The long form adds tensor parallelism, a vocabulary of 152k, two epochs, fine-tuning and flat resources:
`python -m tests.soak --minutes 60 --json benchmarks/soak.json`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.loops.jobs import REWARD, Job
from tests.soak import model, rows
from tests.soak.lengths import environment
from tests.soak.settings import DEEP_BF16, GROUP, LONGEST, PROMPTS, settings
from trainer.config.run_folder import read_lines
from trainer.observe.history import read_history

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LAYERS = {"qwen2_5_vl": 28, "qwen3_vl_moe": 24, "qwen3_5": 24}
"""The depth of 7B, half of that of 30B-A3B, and that of 0.8B."""
MISMATCH = {"fp32": (1e-4, 5e-6), "bf16": (2.0, DEEP_BF16)}
"""Largest and mean |log-prob difference| of engine and policy in a step, by the type that both compute in."""
VOCABULARY = 49_152
"""2,730 tokens make a chunk of logits: a rank with the long completion has one chunk more."""
STEPS = 6
LONG_STEP = 2
KILLED_IN = 4
SEED = 3
MEAN_TOKENS = 25
DEADLINE_S = 1800


@pytest.fixture(scope="module", params=LAYERS)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    (folder / "reward.py").write_text(REWARD)
    family = request.param
    built = model.build(folder / "model", LAYERS[family], VOCABULARY, family=family)
    data = rows.write(folder / "data", STEPS * PROMPTS, PROMPTS, SEED)
    config = settings(folder, built, data, "whole", family)
    return replace(
        config,
        run=replace(config.run, max_steps=STEPS, seed=SEED),
        checkpoint=replace(config.checkpoint, keep_last=STEPS),
    )


def job(config, folder) -> Job:
    long_row = rows.first(LONG_STEP, STEPS * PROMPTS, PROMPTS, SEED)
    return Job(config, folder, environment([long_row], LONGEST, MEAN_TOKENS), module="tests.soak.lengths")


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The run that nothing disturbs."""
    started = job(base, tmp_path_factory.mktemp("whole")).start()
    try:
        assert started.wait(DEADLINE_S) == 0, started.tail()
        assert started.left_over() == [], "processes are left over"
    finally:
        started.kill()
    return started


def test_real_lengths_on_a_deep_model(whole):
    lines = whole.metrics()
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    # A patch of Qwen3-VL is larger, so that images of a size have fewer tokens.
    least = 2_400 if whole.config.model.max_pixels > 1280 * 28**2 else 2_800
    assert max(line["tokens/prompt_max"] for line in lines[1:]) > least
    largest, average = MISMATCH[whole.config.model.dtype]
    for line in lines[1:]:
        assert line["grad/norm"] > 0 and line["optim/skipped_updates"] == 0 and line["data/left_out"] == 0
        print(line["step"], line["mismatch/logprob_abs_mean"], line["mismatch/logprob_abs_max"])
        assert line["mismatch/logprob_abs_mean"] < average and line["mismatch/logprob_abs_max"] < largest
    # With none of the others above 200, whichever rank does not have the longest one is done at once.
    lengths = sorted(
        s["tokens"] for s in read_lines(whole.run_dir / "samples.jsonl") if s["step"] == LONG_STEP
    )
    assert len(lengths) == PROMPTS * GROUP and lengths[-1] == LONGEST and lengths[-2] < 200, lengths
    # The head alone is 12 MiB; what DeepSpeed never lets go of (parameters of less than 100,000 elements)
    # counts once.
    width = 4 if whole.config.model.dtype == "fp32" else 2
    for line in read_history(whole.run_dir)[1:]:
        assert line["perf/gathered_gib"] * 2**30 > 3 * line["perf/passes"] * width * VOCABULARY * model.WIDTH


def test_killed_and_resumed(base, whole, tmp_path):
    """The killed run starts from the other's checkpoint of step 2, so that the long step is computed once."""
    again, name = (
        job(replace(base, run=replace(base.run, dir=str(tmp_path / "run"))), tmp_path),
        "step-00000002",
    )
    shutil.copytree(whole.run_dir / "checkpoints" / name, again.run_dir / "checkpoints" / name)
    try:
        again.start().until(lambda: again.in_phase("update", KILLED_IN), DEADLINE_S)
        again.kill()
        assert again.start().wait(DEADLINE_S) == 0, again.tail()
    finally:
        again.kill()
    assert again.tail(1_000_000).count("resumed from step 2") == 2
    assert again.metrics() == whole.metrics()
