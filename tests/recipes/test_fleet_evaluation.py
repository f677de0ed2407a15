"""`evaluate --fleet`: machines that sample, and a small one that hands out rows."""

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
MORE = ["--target", "skypilot-runpod", "--bucket", "s3://mine", "--run-id", "mine", "--dry-run"]


@pytest.mark.parametrize("asked", [("--benchmarks", "mathvista", "--samples", "4"), ("--pass-rate",)])
def test_machines_that_sample_and_one_that_loads_no_model(asked, capsys):
    code, out, err = run(capsys, "evaluate", SEVEN, *asked, "--fleet", "3xL40S:spot", *MORE)
    assert code == 0, err
    assert "run      mine: 1 x 1 A100-80GB/H100 on skypilot-runpod" in out, "8 train it"
    assert "3 x 1 L40S on skypilot-runpod" in out
    head, _, sampling = out.partition("# A machine that samples for a run")
    assert "pass_rate_samples: " in head and "workers: only" in head and "accelerators: A100-80GB:1" in head
    assert "trainer.fleet.machine" in sampling and "accelerators: L40S:1" in sampling


def test_without_workers_it_is_as_it_was(capsys):
    code, out, _ = run(capsys, "evaluate", SEVEN, "--benchmarks", "mathvista", *MORE)
    assert code == 0 and "trainer.fleet.machine" not in out and "workers: only" not in out


def test_workers_that_do_not_hold_the_model_are_refused(capsys):
    big = ["evaluate", "grpo-qwen2.5-vl-72b-mathv60k", "--benchmarks", "mathvista"]
    code, _, err = run(capsys, *big, "--fleet", "2xL40S", *MORE)
    assert code == 2 and "L40S" in err


def test_workers_whose_gpus_hold_it_together_sample_for_one_that_has_fewer(capsys):
    big = ["evaluate", "grpo-qwen2.5-vl-72b-mathv60k", "--benchmarks", "mathvista"]
    code, out, err = run(capsys, *big, "--fleet", "2x4xA100-80GB", *MORE)
    assert code == 0, err
    head, _, sampling = out.partition("# A machine that samples for a run")
    assert "accelerators: A100-80GB:1" in head
    assert "tensor_parallel: 4" in sampling and "accelerators: A100-80GB-SXM:4" in sampling


def test_on_this_machine_it_is_a_number(capsys):
    local = ["--target", "local", "--bucket", "s3://mine/runs", "--run-id", "mine", "--dry-run"]
    code, out, err = run(capsys, "evaluate", "demo", "--pass-rate", "--fleet", "2", *local)
    assert code == 0, err
    assert "CPU ranks on local" in out and "2 without a GPU on local" in out
