"""A run and its rollout worker as a person starts them, on this machine, with a store between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.presets import resolve
from tests.loops.jobs import ROOT
from tests.servers import rclone
from trainer.config.run_folder import read_progress, read_roster

DESK = (
    "import sys; from recipes.commands import cli; cli.ROOT = sys.argv[1]; sys.exit(cli.main(sys.argv[2:]))"
)
LEFT_OUT = {".venvs", ".cache", "runs", ".git"}
SMALL = {
    "run.max_steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_tokens": 16,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 2,
    "checkpoint.export_hf": "never",
    "fleet.workers": "only",
    "fleet.idle_s": 300,
}


@pytest.fixture
def desk(tmp_path, tiny_model, mixed_dataset):
    """Runs launch.py in a checkout of its own, whose environment is that of the tests and whose model and
    data are there."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in LEFT_OUT:
            (checkout / entry.name).symlink_to(entry)
    python = checkout / ".venvs/cpu/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (checkout / ".venvs/cpu/.pinned").touch()

    work = tmp_path / "work"
    for step, source in zip(resolve("demo", []).steps, (mixed_dataset, tiny_model), strict=True):
        folder = step.creates.replace("${DATA}", f"{work}/data").replace("${MODELS}", f"{work}/models")
        Path(folder).parent.parent.mkdir(parents=True, exist_ok=True)
        Path(folder).parent.symlink_to(source)
    own = {"WORK": str(work), "PYTHONPATH": str(ROOT), "SPOTRL_METADATA": "off", "HOME": str(tmp_path)}

    def run(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", DESK, str(checkout), *words]
        return subprocess.run(command, env=os.environ | own | env, cwd=ROOT, capture_output=True, text=True)

    run.folder = checkout / "runs"
    return run


@pytest.mark.long
def test_a_worker_joins_a_run_by_one_command_and_goes_when_it_is_over(desk, tmp_path):
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    with rclone(tmp_path / "stored") as server:
        up = ("up", "demo", "--target", "local", "--bucket", "s3://bucket/runs", "--run-id", "rented")
        started = desk(*up, "--detach", *sets, env=server.env)
        assert started.returncode == 0, started.stderr
        try:
            worker = desk(
                "up", "rollout-worker", "--set", "fleet.run=rented", "--target", "local", env=server.env
            )
            assert worker.returncode == 0, worker.stdout[-3000:] + worker.stderr[-3000:]
            assert "ends: the run has reached its last step" in worker.stdout
            assert "Failed to load weights" not in worker.stdout, "what vLLM says of every new version"
            end = time.monotonic() + 60
            while read_progress(desk.folder / "rented").get("status") == "running":
                assert time.monotonic() < end
                time.sleep(0.2)
        finally:
            desk("down", "rented", env=server.env)
        assert read_progress(desk.folder / "rented")["status"] == "finished"
        (seen,) = read_roster(desk.folder / "rented")
        assert seen["device"] == "cpu" and seen["completions"] >= 2 * 4 * 4
        said = desk("status", "rented", env=server.env).stdout
        assert "1 to sample for rented" in said and "waited for samples" in said
        shown = [path.name for path in desk.folder.iterdir()]
        assert len(shown) == 2 and (desk.folder / "rented/fleet.key").stat().st_mode & 0o077 == 0
