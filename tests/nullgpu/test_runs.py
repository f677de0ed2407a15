"""Runs of tiny models on the device. Values have no meaning: what is asserted is that every phase ends, and
what the ranks call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.nullgpu import counts, runs
from trainer import config as configuration


@dataclass(frozen=True)
class Case:
    """A run: the model's family, what is changed, and how many cards there are."""

    family: str = "qwen2_5_vl"
    changed: tuple[str, ...] = ()
    ranks: int = 1


CASES = {
    "one card": Case(),
    "sleep level 1": Case(changed=("rollout.sleep_level=1",)),
    "states in host memory": Case(
        changed=("optimizer.offload_optimizer=true", "optimizer.offload_reference=true")
    ),
    "two ranks": Case(ranks=2),
    "tensor parallel": Case(changed=("rollout.tensor_parallel=2",), ranks=2),
    "lora": Case(changed=("lora.rank=8",)),
    "qlora": Case(changed=("lora.rank=8", "lora.qlora=true")),
    "qwen3-vl": Case("qwen3_vl"),
    "qwen3.5": Case("qwen3_5"),
    "experts": Case("qwen3_vl_moe", ("algorithm.routing_replay=true",)),
    "staleness": Case(changed=("rollout.staleness=1",)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(2400)
def test_a_run_goes_to_its_end_and_resumes(family_model, mixed_dataset, tmp_path, name):
    case = CASES[name]
    base = runs.tiny(family_model(case.family), mixed_dataset, tmp_path / "run")
    options = [f"placement.workers_per_node={case.ranks}", *case.changed]
    config = configuration.override(base, options)

    first = runs.run(configuration.override(config, ["run.max_steps=1"]), tmp_path, devices=case.ranks)
    assert first.code == 0, first.said[-6000:]
    assert len(first.ranks) == case.ranks
    check(first, case)

    again = runs.run(config, tmp_path, devices=case.ranks)
    assert again.code == 0, again.said[-6000:]
    assert [line["step"] for line in again.metrics if "loss/total" in line] == [1, 2]


def check(done: runs.Done, case: Case) -> None:
    """What one step did on each rank."""
    assert counts.differences(done.ranks) == []
    for rank in done.ranks:
        assert rank.total("launch", "LearnerPart.update") > 100
        assert rank.total("launch", "SamplerPart.sample") > 10
        assert rank.total("captured", "SamplerPart.start") > 100
        assert rank.total("collective", "LearnerPart.update") >= (case.ranks > 1)


def test_sft_by_torchrun(tiny_model, mixed_dataset, tmp_path):
    base = runs.tiny(tiny_model, mixed_dataset, tmp_path / "run")
    config = replace(base, method="sft", sft=configuration.SFT(batch_size=8, max_tokens=300))
    config = configuration.override(config, ["placement.workers_per_node=2", "algorithm.kl_coef=0"])
    done = runs.run(config, tmp_path, loop="sft", devices=2, torchrun=True)
    assert done.code == 0, done.said[-6000:]
    assert [line["step"] for line in done.metrics if "loss/total" in line] == [1, 2]
    assert len(done.ranks) == 2
    assert counts.differences(done.ranks) == []
