"""The memory plan against the resident memory of two real ZeRO-3 ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.plan import memory
from recipes.plan.models import shape_of
from trainer import config as c
from trainer.worker import environment

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def medium_model(tmp_path_factory):
    from data_prep import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("models") / "medium", 0, "medium")


@pytest.mark.slow
def test_weights_and_states_take_what_the_plan_says(medium_model, mixed_dataset, tmp_path, free_port):
    config = c.RunConfig(
        method="sft",
        run=c.Run(name="measured", dir=str(tmp_path / "run")),
        model=c.Model(path=str(medium_model), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(mixed_dataset), prompt_max_tokens=300),
        algorithm=c.Algorithm(micro_batch=4),
        sft=c.SFT(batch_size=8, max_tokens=128),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False),
        checkpoint=c.Checkpoint(export_hf="never"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    env = os.environ | environment(config) | {"PYTHONPATH": str(HERE.parents[1])}
    outs = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    command = [sys.executable, str(HERE / "measured_rank.py"), str(path)]
    ranks = [subprocess.Popen([*command, str(r), str(free_port), str(out)], env=env) for r, out in enumerate(outs)]
    try:
        assert [process.wait(550) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    shape = shape_of(str(medium_model))
    assert shape
    held = next(phase for phase in memory.phases(config, shape, 0.0) if phase.name == "save").parts
    # Gradients and bucket are not touched before the first backward pass, so the system has not given their pages yet.
    planned = held["policy shard"] + held["fp32 master"] + held["Adam moments"]
    for out in outs:
        measured = json.loads(out.read_text())
        assert measured["stands"] - measured["before"] == pytest.approx(planned, rel=0.10)
