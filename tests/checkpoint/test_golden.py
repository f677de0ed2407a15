"""A checkpoint that revision 5ad573f wrote is resumed by the code of today, wherever the clone lies; for
ever.

It is never made again: a newer one would prove nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.loops.jobs import Job
from trainer import config as c
from trainer.checkpoint.manager import Checkpoints
from trainer.data.dataset import Dataset

GOLDEN = Path(__file__).with_name("golden")
SAVED, LAST = 2, 4
NOT_COMPUTED = ("time/", "perf/", "node/")


@pytest.fixture
def config(tmp_path) -> c.RunConfig:
    """The run as someone else has it: its folder, data and model lie elsewhere."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    here = tmp_path / "golden"
    moved = [f"run.dir={here}/run", f"data.path={here}/data", f"model.path={here}/model"]
    return c.override(c.load(here / "run/config.yaml"), [*moved, f"rewards.function={here}/reward.py:reward"])


def test_it_is_found_and_read(config):
    told: list[str] = []
    fingerprint = Dataset(config.data.path, config.data.split).fingerprint
    checkpoints = Checkpoints(config, fingerprint, say=told.append)
    found = checkpoints.find()
    assert found is not None and found.step == SAVED
    assert found.state["updates"] == 8 and found.state["reward_norm"]["prompts"] >= 4
    assert any("does not say what its model" in line for line in told)
    changed = Checkpoints(c.override(config, ["algorithm.clip_high=0.5"]), fingerprint, say=told.append)
    with pytest.raises(
        c.ConfigError, match="algorithm.clip_high is 0.5, the checkpoint has 0.2: set it back"
    ):
        changed.find()
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_goes_on_to_the_same_steps(config, tmp_path):
    """Bit for bit where the processor computes as the one of then did; else to the rounding of fp32."""
    job = Job(config, tmp_path / "job").start()
    assert job.wait(600) == 0, job.tail()
    assert f"resumed from step {SAVED}" in job.tail()
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    now = {line["step"]: line for line in lines}
    assert sorted(now) == list(range(1, LAST + 1))
    for line in (GOLDEN / "after.jsonl").read_text().splitlines():
        then = json.loads(line)
        for name, value in then.items():
            if not name.startswith(NOT_COMPUTED):
                assert now[then["step"]][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
