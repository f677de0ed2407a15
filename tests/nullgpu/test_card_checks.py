"""`gpu-check` to its end: each of its checks on the device, with the tiny model in place of 3B's shape.
Verdicts are left out (hooks/without_verdicts.py): a check that fails here would end with a traceback on a
card too."""

from __future__ import annotations

import json
import shutil

import pytest

from recipes import gpu_check
from recipes.presets import get
from tests.nullgpu import null_device
from tests.nullgpu.null_device import PYTHON
from trainer import config as configuration
from trainer.config.run_folder import GPU_CHECK, GPU_CHECK_PAGE


@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check.name)
@pytest.mark.timeout(7200)
def test_a_check_of_a_card_ends(tiny_model, mixed_dataset, tmp_path, monkeypatch, record_property, check):
    folder = tmp_path / "run"
    config = configuration.override(
        get("gpu-check").config,
        [
            f"run.dir={folder}",
            "run.id=check",
            "run.max_steps=4",
            f"model.path={tiny_model}",
            f"data.path={mixed_dataset}",
            "rollout.prompts_per_step=4",
            "evaluation.every_steps=2",
            "evaluation.max_samples=4",
            "checkpoint.remote=",
            f"placement.workers_per_node={check.gpus}",
        ],
    )
    path = tmp_path / "run.yaml"
    path.write_text(configuration.dump(config))
    shutil.copytree(tiny_model, folder / "models/3b")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p without_verdicts --timeout=7200")
    command = [PYTHON, "-m", "tests.nullgpu.scripts.gpu_check", "--config", path, "--only", check.name]
    done = null_device.run(command, devices=check.gpus, timeout_s=7200, check=False)
    said = json.loads((folder / GPU_CHECK).read_text())
    (ended,) = said["checks"]
    if check.name == gpu_check.DEMO:  # nothing learns here, and that is its outcome
        assert {"demo: held-out accuracy after", "demo: last step"} <= said["figures"].keys(), done.stdout[
            -6000:
        ]
    else:
        assert ended["outcome"] == "passed", done.stdout[-6000:] + done.stderr[-2000:]
    assert f"| {check.name} | {ended['outcome']} |" in (folder / GPU_CHECK_PAGE).read_text()
    record_property("figures", len(said.get("figures", {})))
