"""The same short run on several numbers of nodes: what is started, once, and the table."""

import json

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.commands import scaling
from recipes.presets import get, resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

BIG, GRPO = "sft-qwen2.5-72b-full", "grpo-qwen2.5-vl-72b-mathv60k-orig"


def written(run_id, step_s, per_gpu):
    folder = run_record.RUNS / run_id
    folder.mkdir(parents=True)
    RunRecord(run_id=run_id, recipe=BIG, target="slurm").save()
    lines = [
        {
            "step": s,
            "time/step_s": 99.0 if s < 4 else step_s,
            "perf/tokens_per_s_per_gpu": per_gpu if s > 3 else 1,
        }
        for s in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_gpu_has_as_much_to_do_on_every_number_of_nodes():
    rows = {n: resolve(BIG, scaling.size_overrides(get(BIG), n, 20)).config for n in (4, 16)}
    assert [c.sft.batch_size / c.placement.world_size for c in rows.values()] == [4.0, 4.0]
    two = resolve(GRPO, scaling.size_overrides(get(GRPO), 8, 20)).config
    assert (two.rollout.prompts_per_step, two.algorithm.samples_per_update) == (128, 128)
    with pytest.raises(ConfigError, match="cannot be cut to 3"):
        scaling.size_overrides(resolve(BIG, ["sft.batch_size=513"]), 3, 20)


def test_what_is_missing_is_shown_and_what_is_there_makes_the_table(capsys):
    written("s-4n", 10.0, 100.0)
    code, out, _ = run(
        capsys, "scaling", BIG, "--target", "slurm", "--nodes", "8,4", "--run-id", "s", "--dry-run"
    )
    assert code == 0 and "batch_size: 256" in out and "batch_size: 128" not in out, "the smaller one is there"
    written("s-8n", 11.0, 90.0)
    code, out, _ = run(capsys, "scaling", BIG, "--target", "slurm", "--nodes", "4,8", "--run-id", "s")
    head, four, eight = (line.split() for line in out.strip().splitlines())
    assert code == 0 and head[-1] == "efficiency"
    assert four[:3] == ["4", "32", "10.00"] and four[4:] == ["3,200", "1.00x", "100%"]
    assert eight[:3] == ["8", "64", "11.00"] and eight[4:] == ["5,760", "1.80x", "90%"]
    assert float(four[3]) > 0 and float(eight[3]) > 0


def test_a_run_without_steps_is_named(capsys):
    written("s-4n", 10.0, 100.0)
    RunRecord(run_id="s-8n", recipe=BIG, target="slurm").save()
    code, out, _ = run(capsys, "scaling", BIG, "--target", "slurm", "--nodes", "4,8", "--run-id", "s")
    assert code == 2 and "launch.py pull s-8n" in out and "3,200" in out


@pytest.mark.parametrize("given", [("--nodes", "0,2"), ("--nodes", "two"), ("--steps", "3")])
def test_senseless_sizes_are_refused_in_one_line(capsys, given):
    code, _, err = run(capsys, "scaling", BIG, "--target", "slurm", *given)
    assert code == 2 and given[0] in err
