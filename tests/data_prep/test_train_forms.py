"""Own rows of every form, from files to two real training steps: prepared, shown, trained on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from data_prep import commands
from tests.data_prep import test_own
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.data.dataset import Dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def trained(config, tmp_path, source, *arguments, module="trainer.loops.grpo") -> tuple[list[dict], Job]:
    """Prepares and shows `source`, then runs two steps of one rank. Returns the metrics and the
    job."""
    out = str(tmp_path / "prepared")
    assert commands.main(["prepare", str(source), *arguments, "--out", out, "--validation", "0"]) == 0
    assert commands.main(["show", out, "--tokenizer", config.model.path]) == 0
    (tmp_path / "reward.py").write_text(REWARD)
    config = replace(
        config,
        run=replace(config.run, max_steps=2),
        data=replace(config.data, path=out, prompt_max_tokens=1024),
        rollout=replace(config.rollout, prompts_per_step=2, samples_per_prompt=2),
        algorithm=replace(config.algorithm, kl_coef=0.0),
        rewards=c.Rewards(workers=1, function=f"{tmp_path / 'reward.py'}:reward"),
        checkpoint=c.Checkpoint(every_steps=2, export_hf="never"),
        placement=replace(config.placement, workers_per_node=1),
    )
    job = Job(config, tmp_path / "job", module=module).start()
    try:
        assert job.wait(600) == 0, job.tail()
    finally:
        job.kill()
    return job.metrics(), job


def check(lines, rows) -> None:
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["data/left_out"] == 0 and line["tokens/prompt_mean"] > 20 for line in lines)
    assert any(line["grad/norm"] > 0 for line in lines), "nothing was learned from"
    assert len(rows) == test_own.ROWS


@pytest.mark.long
def test_two_steps_on_chats_with_data_urls(small_config, tmp_path, capsys):
    lines, job = trained(small_config, tmp_path, test_own.openai(tmp_path / "raw"))
    check(lines, Dataset(job.config.data.path))
    assert "supervised: " in capsys.readouterr().out


@pytest.mark.long
def test_two_steps_of_supervised_training_on_instructions(small_config, tmp_path):
    rows = [
        {"instruction": f"Write {i}.", "input": "", "output": f"Here is {i}, written out. " * 9}
        for i in range(6)
    ]
    config = replace(small_config, method="sft", sft=c.SFT(batch_size=2, max_tokens=1024))
    source = test_own.lines(tmp_path / "d.jsonl", rows)
    lines, _ = trained(config, tmp_path, source, "--sft", module="trainer.loops.sft")
    assert [line["step"] for line in lines] == [1, 2] and all(line["sft/loss"] > 0 for line in lines)


@pytest.mark.long
def test_pass_rates_are_measured_and_go_on_where_they_were_stopped(small_config, tmp_path):
    config = replace(small_config, evaluation=c.Evaluation(pass_rate_samples=4))
    source = test_own.plain(tmp_path / "raw")
    _, job = trained(config, tmp_path, source, module="trainer.loops.pass_rate")
    path = job.run_dir / "pass_rates.jsonl"
    whole = path.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["id"] for record in records] == [row.id for row in Dataset(job.config.data.path)]
    assert all(record["samples"] == 4 and 0 <= record["pass_rate"] <= 1 for record in records)
    path.write_text(whole[: len(whole) // 2])  # a torn line in the second block
    again = Job(job.config, tmp_path / "job", module="trainer.loops.pass_rate").start()
    try:
        assert again.wait(600) == 0, again.tail()
    finally:
        again.kill()
    assert path.read_text() == whole, "the same seeds must give the same completions"
    rates = ["--rates", str(path), "--pass-rate", "0..1", "--out", str(tmp_path / "kept")]
    assert commands.main(["filter", job.config.data.path, *rates]) == 0 and len(
        Dataset(tmp_path / "kept")
    ) == len(records)


@pytest.mark.long
def test_benchmarks_are_scored_from_files_to_the_table(small_config, tmp_path):
    """Two evaluation sets as one dataset, as `evaluate --benchmarks` asks for them."""
    evaluation = c.Evaluation(benchmarks=True, pass_rate_samples=2, temperature=1.0)
    config = replace(small_config, evaluation=evaluation, data=replace(small_config.data, split="test"))
    source = test_own.plain(tmp_path / "raw")
    _, job = trained(
        config, tmp_path, source, "--evaluation", "--split", "test", module="trainer.loops.pass_rate"
    )
    found = json.loads((job.run_dir / "benchmarks.json").read_text())
    rows = Dataset(job.config.data.path, "test")
    (figures,) = found["benchmarks"].values()
    assert figures["problems"] == len(rows) and {"pass@1", "pass@2", "maj@2", "interval"} <= figures.keys()
    assert found["samples"] == 2 and (job.run_dir / "benchmarks.md").read_text().startswith("| benchmark |")
