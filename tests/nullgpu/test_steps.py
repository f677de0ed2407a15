"""Two steps of the ranks of each kind of recipe, on the device. Values have no meaning: a test asserts that
every phase ends, what the ranks call, and that memory comes and goes with the phases."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.nullgpu import counts, null_device, runs
from tests.nullgpu.null_device import PYTHON
from trainer import config as configuration


@dataclass(frozen=True)
class Case:
    """A recipe: the model's family, what is changed, and how many ranks there are."""

    family: str = "qwen2_5_vl"
    changed: tuple[str, ...] = ()
    ranks: int = 1


EAGER = "rollout.eager=true"
"""vLLM compiles nothing and records no graphs, which takes most of a case's minutes."""
CASES = {
    "one card": Case(),
    "eager, sleep level 1": Case(changed=(EAGER, "rollout.sleep_level=1")),
    "states in host memory": Case(
        changed=(EAGER, "optimizer.offload_optimizer=true", "optimizer.offload_reference=true")
    ),
    "tensor parallel": Case(changed=("rollout.tensor_parallel=2",), ranks=2),
    "tensor parallel, eager": Case(changed=(EAGER, "rollout.tensor_parallel=2"), ranks=2),
    "lora": Case(changed=(EAGER, "lora.rank=8")),
    "qwen3-vl": Case("qwen3_vl", (EAGER,)),
    "qwen3.5": Case("qwen3_5", (EAGER,)),
    "experts": Case("qwen3_vl_moe", (EAGER,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(2400)
def test_two_steps(family_model, mixed_dataset, tmp_path, free_port, record_property, name):
    case = CASES[name]
    base = runs.tiny(family_model(case.family), mixed_dataset, tmp_path / "run")
    options = [f"placement.workers_per_node={case.ranks}", *case.changed]
    config = configuration.override(base, options)
    path = tmp_path / "run.yaml"
    path.write_text(configuration.dump(config))
    command = [PYTHON, "-m", "tests.nullgpu.scripts.step", path, str(free_port)]
    record = tmp_path / "counts"
    callers = {"CALLERS": 1}
    done = null_device.run(command, devices=case.ranks, record=record, settings=callers, timeout_s=2400)

    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(said) == case.ranks
    recorded = [one for one in counts.read(record) if one.rank is not None]
    assert len(recorded) == case.ranks
    assert counts.differences(recorded) == []
    for rank in said:
        memory = {phase: figures["used_gib"] for phase, figures in rank["phases"].items()}
        assert rank["sleeps"]
        assert memory["sync 0"] > 2 * memory["build engine"]  # the engine is awake, with its cache
        assert memory["rest 0"] < memory["sample 0"] / 2
        assert memory["update 1"] < 1.2 * memory["update 0"]
    record_property("phases of rank 0", counts.by_phase(recorded[0]))
    record_property("waits of rank 0", counts.waits(recorded[0], ("sync", "sample", "logprobs", "update")))
    record_property("collectives of each rank", [sum(map(len, one.collectives.values())) for one in recorded])
    for rank in recorded:
        assert rank.total("launch", "update") > 100
        assert rank.total("launch", "sample") > 10
        assert rank.total("captured", "build engine") > 100 or config.rollout.eager
