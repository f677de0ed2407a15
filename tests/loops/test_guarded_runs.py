"""Real runs whose rewards, completions or first steps go wrong: the cause is named, nothing is spoiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.loops.drill import configure
from tests.loops.jobs import Job
from trainer import config as c
from trainer.checkpoint.manifest import manifests_here
from trainer.config.run_folder import read_lines
from trainer.system.exit_codes import EXIT_CONFIG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_rank(small_config):
    return replace(
        small_config,
        run=replace(small_config.run, max_steps=4),
        rollout=replace(small_config.rollout, prompts_per_step=4, samples_per_prompt=4),
        placement=replace(small_config.placement, workers_per_node=1),
        checkpoint=replace(small_config.checkpoint, every_steps=1),
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_reward_that_is_not_a_number_ends_the_run_by_name_and_is_not_saved(one_rank, tmp_path):
    path = tmp_path / "reward.py"
    healthy = "def reward(text, *_):\n    return (sum(map(ord, text)) % 17) / 17\n"
    counted = f"open({str(tmp_path / 'graded')!r}, 'a').write('.')"
    spoilt = (
        f"def reward(text, *_):\n    {counted}\n    n = len(open({str(tmp_path / 'graded')!r}).read())\n"
        "    return float('nan') if n == 40 else (sum(map(ord, text)) % 17) / 17\n"
    )
    path.write_text(spoilt)
    config = replace(
        one_rank,
        rewards=c.Rewards(workers=1, function=f"{path}:reward"),
        algorithm=replace(one_rank.algorithm, normalize_reward=True),
    )
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.wait() == EXIT_CONFIG, job.tail()
        said = job.tail()
        assert f"nan by rewards.function {path}:reward for row " in said and ", completion '" in said
        assert "1 of 16 rewards are not finite" in said and "learning rate" not in said
        done = [line["step"] for line in read_lines(job.run_dir / "metrics.jsonl")]
        assert (
            done
            and max(done) < 4
            and all(line["step"] in done for line in read_lines(job.run_dir / "metrics.jsonl"))
        )
        newest = max(manifests_here(job.run_dir / "checkpoints"))

        path.write_text(healthy)
        job.start()
        assert job.wait() == 0, job.tail()
        assert f"resumed from step {newest}" in job.tail()
        lines = read_lines(job.run_dir / "metrics.jsonl")
        assert lines[-1]["step"] == 4 and all(isinstance(x["reward/mean"], float) for x in lines)
    finally:
        job.kill()


@pytest.mark.long
def test_where_every_completion_is_cut_and_masked_nothing_moves(one_rank, tmp_path):
    """One token each, and the end token is not sampled at this seed."""
    config = replace(
        one_rank,
        rollout=replace(one_rank.rollout, max_tokens=1),
        algorithm=replace(
            one_rank.algorithm, mask_truncated=True, kl_coef=0.01, kl_target=0.05, kl_horizon=100
        ),
        optimizer=replace(one_rank.optimizer, learning_rate=1e-2, weight_decay=0.1),
        checkpoint=replace(one_rank.checkpoint, export_hf="end"),
    )
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.wait() == 0, job.tail()
        lines = read_lines(job.run_dir / "metrics.jsonl")
        assert [line["optim/empty_updates"] for line in lines] == [1.0] * 4
        of_updates = ("loss/total", "grad/norm", "kl/mean", "entropy/mean", "mismatch/logprob_abs_mean")
        assert not [name for line in lines for name in of_updates if name in line]
        assert {line["kl/coef"] for line in lines} == {0.01}
        assert "entropy collapsed" not in job.log.read_text()
        folders = (job.run_dir / "hf", config.model.path)
        ours, base = (AutoModelForImageTextToText.from_pretrained(one).state_dict() for one in folders)
        assert ours.keys() == base.keys() and all(torch.equal(ours[name], base[name]) for name in base)
    finally:
        job.kill()


@pytest.mark.long
def test_a_collapse_right_after_a_resume_is_seen(tmp_path):
    """The real session, metrics and checkpoints around ranks that pretend: the second process makes two steps
    before the collapse."""
    config = configure(tmp_path, 8, 2, standin=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
    env |= {"STANDIN_COLLAPSES": "11", "STANDIN_STEP_S": "0.01", "SPOTRL_METADATA": "off"}
    said = ""
    for steps in (8, 12):
        config = replace(config, run=replace(config.run, max_steps=steps))
        (tmp_path / "run.yaml").write_text(c.dump(config))
        command = [sys.executable, "-m", "tests.loops.standin", "--config", str(tmp_path / "run.yaml")]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
    assert "resumed from step 8" in said
    assert "warning: step 11: entropy collapsed to 0.02 from 1.2 at the start" in said
