"""The first sync is checked, and what a run exports is the model that it trained, for transformers and for
vLLM."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.families import BOUNDS, FAMILIES, VISION, dtype, reroutes
from tests.loops.jobs import REWARD, Job
from trainer.system.exit_codes import EXIT_ERROR


@pytest.mark.long
def test_a_broken_sync_stops_the_run(small_config, tmp_path):
    config = replace(small_config, rollout=replace(small_config.rollout, sync_tolerance=1e-12))
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.process is not None and job.process.wait(300) == EXIT_ERROR
    finally:
        job.kill()
    assert "the engine does not hold the policy's weights" in job.log.read_text()
    assert not (Path(config.run.dir) / "checkpoints").exists()


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_export_loads_everywhere(small_config, run_ranks, family_model, text_dataset, family, tmp_path):
    """Gradient checkpointing on; the vision tower frozen, so that the export must take it from the
    original."""
    (tmp_path / "reward.py").write_text(REWARD)
    data = small_config.data if family in VISION else replace(small_config.data, path=str(text_dataset))
    config = replace(
        small_config,
        data=data,
        run=replace(small_config.run, max_steps=2),
        rewards=replace(small_config.rewards, function=f"{tmp_path / 'reward.py'}:reward"),
        model=replace(
            small_config.model,
            path=str(family_model(family)),
            dtype=dtype(family),
            gradient_checkpointing=True,
            freeze_vision=family in VISION,
        ),
        optimizer=replace(small_config.optimizer, learning_rate=0.01),
        checkpoint=replace(small_config.checkpoint, every_steps=2, export_hf="end"),
    )
    job = Job(config, tmp_path / "job").start()
    try:
        assert job.process is not None and job.process.wait(300) == 0, job.log.read_text()[-3000:]
    finally:
        job.kill()
    exported = Path(config.run.dir) / "hf"
    loaded = replace(
        config,
        model=replace(config.model, path=str(exported)),
        placement=replace(config.placement, workers_per_node=1),
    )
    result = run_ranks("exported", loaded)[0]
    (worst, mean), (largest, average) = result["gap"], BOUNDS[config.model.dtype]
    print(family, worst, mean)
    assert (worst < largest or reroutes(family)) and mean < average, (
        "vLLM read other weights than transformers"
    )
    original = run_ranks("exported", replace(loaded, model=config.model))[0]
    for name, values in result["weights"].items():
        assert (values == original["weights"][name]) == name.startswith("model.visual"), name
