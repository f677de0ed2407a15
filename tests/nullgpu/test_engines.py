"""The engine of each recipe as a run starts it, with its CUDA graphs: widths, vocabulary, sequences and ranks
are the recipe's. Only the depth is cut, and one rank of an engine is there. It samples eight tokens for as
many requests as it holds."""

from __future__ import annotations

import json

import pytest

from recipes.presets import RECIPES, get
from tests.nullgpu import null_device
from tests.nullgpu.null_device import PYTHON


def different() -> dict[tuple, str]:
    """The first recipe of each engine: model, ranks, sequences, longest sequence."""
    found: dict[tuple, str] = {}
    for name in RECIPES:
        recipe = get(name)
        config = recipe.config
        if recipe.kind == "train" and config.method == "grpo" and config.placement.device == "cuda":
            engine = config.model.path, config.rollout.tensor_parallel, config.engine_sequences
            found.setdefault(engine, name)
    return found


@pytest.mark.parametrize("engine", different().items(), ids=lambda engine: engine[1])
@pytest.mark.timeout(1800)
def test_an_engine_starts_with_its_graphs(free_port, record_property, engine):
    (_, ranks, sequences), name = engine
    command = [PYTHON, "-m", "tests.nullgpu.scripts.engine", name, str(free_port)]
    done = null_device.run(command, devices=ranks, timeout_s=1800, settings={"NCCL": "alone"})
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["graphs"] > 0
    assert said[f"batch {sequences}"]["iterations"] >= 8
    record_property("engine", said)
