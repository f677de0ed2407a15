"""The memory plan against the memory of two real ZeRO-3 ranks, phase by phase."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import measured_rank
import pytest

from recipes.plan import memory
from trainer import config as c
from trainer.hardware.model_shapes import shape_of
from trainer.ranks.environment import rank_environment

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def medium_model(tmp_path_factory):
    from examples.demo import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("models") / "medium", 0, "medium")


@pytest.mark.long
def test_every_phase_takes_what_the_plan_says(medium_model, picture_dataset, tmp_path, free_port):
    config = c.RunConfig(
        method="sft",
        run=c.Run(name="measured", dir=str(tmp_path / "run")),
        model=c.Model(path=str(medium_model), dtype="fp32", gradient_checkpointing=False, min_pixels=12544),
        data=c.Data(path=str(picture_dataset), prompt_max_tokens=300),
        algorithm=c.Algorithm(micro_batch_tokens=512, logprob_tokens=512),
        sft=c.SFT(batch_size=8, max_tokens=128),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False),
        checkpoint=c.Checkpoint(export_hf="never"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    env = os.environ | rank_environment(config) | measured_rank.MALLOC | {"PYTHONPATH": str(HERE.parents[1])}
    outs = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    command = [sys.executable, str(HERE / "measured_rank.py"), str(path)]
    ranks = [
        subprocess.Popen([*command, str(r), str(free_port), str(out)], env=env) for r, out in enumerate(outs)
    ]
    try:
        assert [process.wait(550) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    shape = shape_of(str(medium_model))
    assert shape
    for out in outs:
        measured = json.loads(out.read_text())
        pixels = measured.pop("patches") * 14**2 // 4  # as large as they came out
        exact = dataclasses.replace(config, model=dataclasses.replace(config.model, max_pixels=pixels))
        parts = {phase.name: phase.parts for phase in memory.memory_phases(exact, shape, 0.0)}
        parts["load"].pop("fp32 gradients")  # gone again before the process can look
        planned = {name: sum(parts[name].values()) for name in measured}
        print({n: (round(measured[n] / 2**20), round(planned[n] / 2**20)) for n in planned})
        for name in planned:
            assert measured[name] == pytest.approx(planned[name], rel=0.10), name
