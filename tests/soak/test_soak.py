"""The soak: deep models on rows of real shapes, a completion of 3,000 tokens beside short ones, killed once;
two ranks an engine, a vocabulary of 152k and supervised fine-tuning on the same rows; memory, files and disk
that do not grow. The last is run with SOAK_MINUTES alone: 60 fill two epochs on two cores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.demo import tiny_model
from tests.families import dtype, loader
from tests.loops.jobs import REWARD, Job
from tests.soak import rows
from tests.soak.lengths import environment
from tests.soak.sampling import Sampler
from trainer import config as c
from trainer.config.run_folder import read_lines
from trainer.observe.history import read_history
from trainer.system.exit_codes import EXIT_PREEMPTED

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

WIDTH = 64
VISION_DEPTH = 4
POSITIONS = 8192
LAYERS = {"qwen2_5_vl": 28, "qwen3_vl_moe": 24, "qwen3_5": 24}
"""The depth of 7B, half of that of 30B-A3B, and that of 0.8B."""
DEEP_BF16 = 0.2
"""Tolerance of a random Qwen3.5 of 24 layers: bf16 alone puts engine and policy 0.11 nats apart, and a lost
layer in the middle 0.4 (benchmarks/bf16_depth.json)."""
MISMATCH = {"fp32": (1e-4, 5e-6), "bf16": (2.0, DEEP_BF16)}
"""Largest and mean |log-prob difference| of engine and policy in a step, by the type that both compute in."""
VOCABULARY, QWEN = 49_152, 152_064
"""With 49,152 words 2,730 tokens make a chunk of logits: a rank with the long completion has one more."""
LONGEST = 3_000
PROMPT_TOKENS = 3_500
MEAN_TOKENS = 25
PROMPTS, GROUP = 4, 4
STEPS = 6
LONG_STEP = 2
KILLED_IN = 4
SEED = 3
DEADLINE_S = 1800


def build(out: Path, layers: int, vocabulary: int, family: str) -> Path:
    """Writes a model as deep as a real one, narrow. A vocabulary above the tokenizer's is padding, which is
    never sampled; it decides how many tokens make a chunk of logits."""
    shape = tiny_model.TinyShape(WIDTH, 2 * WIDTH, layers, 2, 1, WIDTH, 2 * WIDTH, VISION_DEPTH, False)
    tiny_model.SHAPES["soak"] = shape
    tiny_model.build(out, 0, "soak", family)  # ty: ignore[invalid-argument-type]
    model = loader(family).from_pretrained(out, dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    model.config.text_config.max_position_embeddings = POSITIONS
    model.save_pretrained(out)
    tiny_model.publish(model, out / "model.safetensors", family)
    return out


def settings(folder: Path, model: Path, data: Path, family: str) -> c.RunConfig:
    """Two CPU ranks, an engine each."""
    side = 28 if family == "qwen2_5_vl" else 32
    pixels = {"min_pixels": 4 * side**2, "max_pixels": 1280 * side**2}
    tolerance = DEEP_BF16 if dtype(family) == "bf16" else 0.0
    return c.RunConfig(
        run=c.Run(name="whole", dir=str(folder / "whole/run"), max_steps=STEPS, seed=SEED),
        model=c.Model(path=str(model), dtype=dtype(family), gradient_checkpointing=True, **pixels),
        # Images are kept up to the limit: one that the first steps reach, or a cache that fills would look
        # like a leak.
        data=c.Data(path=str(data), prompt_max_tokens=PROMPT_TOKENS, episodes=10**6, image_cache_gib=0.125),
        rollout=c.Rollout(
            prompts_per_step=PROMPTS,
            samples_per_prompt=GROUP,
            max_tokens=LONGEST,
            kv_cache_gib=0.5,
            sleep_level=0,
            sync_tolerance=tolerance,
        ),
        algorithm=c.Algorithm(samples_per_update=PROMPTS * GROUP // 2, kl_coef=0.01),
        # No weight stays gathered between two uses, as none of a model above DeepSpeed's limits does.
        optimizer=c.Optimizer(learning_rate=1e-6, live_parameters=0),
        rewards=c.Rewards(function=f"{folder / 'reward.py'}:reward", workers=1),
        evaluation=c.Evaluation(every_steps=3, temperature=1.0),  # greedy, a completion might never end
        checkpoint=c.Checkpoint(every_steps=2, export_hf="never", keep_last=STEPS),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=PROMPTS * GROUP, samples_every_steps=1),
        guards=c.Guards(end=""),
        sft=c.SFT(batch_size=PROMPTS, max_tokens=8000),
    )


def made(folder: Path, family: str, vocabulary: int = VOCABULARY) -> c.RunConfig:
    (folder / "reward.py").write_text(REWARD)
    model = build(folder / "model", LAYERS[family], vocabulary, family)
    return settings(folder, model, rows.write(folder / "data", STEPS * PROMPTS, PROMPTS, SEED), family)


def job(config, folder, module="tests.soak.lengths") -> Job:
    long_row = rows.first(LONG_STEP, STEPS * PROMPTS, PROMPTS, SEED)
    return Job(config, folder, environment([long_row], LONGEST, MEAN_TOKENS), module=module)


@pytest.fixture(scope="module", params=LAYERS)
def base(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("soak"), request.param)


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
    samples = read_lines(whole.run_dir / "samples.jsonl")
    lengths = sorted(s["tokens"] for s in samples if s["step"] == LONG_STEP)
    assert len(lengths) == PROMPTS * GROUP and lengths[-1] == LONGEST and lengths[-2] < 200, lengths
    # The head alone is 12 MiB; what DeepSpeed never lets go of (parameters of less than 100,000 elements)
    # counts once.
    width = 4 if whole.config.model.dtype == "fp32" else 2
    for line in read_history(whole.run_dir)[1:]:
        assert line["perf/gathered_gib"] * 2**30 > 3 * line["perf/passes"] * width * VOCABULARY * WIDTH


def test_killed_and_resumed(base, whole, tmp_path):
    """The killed run starts from the other's checkpoint of step 2, so that the long step is computed once."""
    again = job(replace(base, run=replace(base.run, dir=str(tmp_path / "run"))), tmp_path)
    name = "step-00000002"
    shutil.copytree(whole.run_dir / "checkpoints" / name, again.run_dir / "checkpoints" / name)
    try:
        again.start().until(lambda: again.in_phase("update", KILLED_IN), DEADLINE_S)
        again.kill()
        assert again.start().wait(DEADLINE_S) == 0, again.tail()
    finally:
        again.kill()
    assert again.tail(1_000_000).count("resumed from step 2") == 2
    assert again.metrics() == whole.metrics()


@pytest.mark.parametrize(
    ("vocabulary", "changes"),
    [
        (VOCABULARY, ["rollout.tensor_parallel=2"]),
        (QWEN, []),
        (VOCABULARY, ["method=sft", "evaluation.every_steps=0"]),
    ],
    ids=["two ranks an engine", "a large vocabulary", "fine-tuning"],
)
def test_a_few_steps_of_another_kind(tmp_path, vocabulary, changes):
    config = c.override(made(tmp_path, "qwen2_5_vl", vocabulary), [*changes, f"run.max_steps={LONG_STEP}"])
    sft = config.method == "sft"
    run = job(config, tmp_path / "job", "trainer.loops.sft" if sft else "tests.soak.lengths").start()
    try:
        assert run.wait(DEADLINE_S) == 0, run.tail()
        assert run.left_over() == []
    finally:
        run.kill()
    last = run.metrics()[-1]
    assert last["sft/loss"] > 0 if sft else last["tokens/response_max"] == LONGEST
    assert sft or last["mismatch/logprob_abs_max"] < MISMATCH["fp32"][0]


@pytest.mark.skipif("SOAK_MINUTES" not in os.environ, reason="SOAK_MINUTES=60 runs it")
def test_memory_files_and_disk_do_not_grow(tmp_path):
    """Killed after a quarter of the time; what is held is compared from the first step after that on."""
    seconds = 60 * float(os.environ["SOAK_MINUTES"])
    config = c.override(made(tmp_path, "qwen2_5_vl"), ["run.max_steps=1000000", "checkpoint.keep_last=2"])
    run = job(config, tmp_path / "job")
    try:
        end = time.time() + seconds / 4
        run.start().until(lambda: time.time() > end and run.in_phase("update", 1), DEADLINE_S)
        killed = run.progress()["step"]
        run.kill()
        folders = {"shm_mib": Path("/dev/shm"), "run_mib": run.run_dir}
        sampler = Sampler(lambda: {str(pid): [pid] for pid in run.pids()}, folders)
        run.start().until(lambda: run.progress().get("step", 0) > killed, DEADLINE_S)
        begun = time.time()
        sampler.start()
        run.until(lambda: time.time() > begun + 3 / 4 * seconds, DEADLINE_S + seconds, poll_s=1)
        sampler.stop()
        grown = sampler.growth(begun, time.time())
        assert run.process
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(600) == EXIT_PREEMPTED and run.left_over() == []
    finally:
        run.kill()
    print(json.dumps(grown, indent=1))
    assert grown and all(held["flat"] for held in grown.values()), grown
