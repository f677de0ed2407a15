"""The demo stays within what its recipe expects, and with a learning rate that is too low it does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.observe import compare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(request):
    """Runs the first steps of the demo by its command; returns the run's folder."""
    folders = []

    def ran(*overrides):
        run_id = f"expected-{request.node.name[-24:].strip('[]').replace('_', '-')}".lower()
        folder = ROOT / "runs" / run_id
        folders.append(folder)
        options = [part for override in ("run.max_steps=10", *overrides) for part in ("--set", override)]
        command = [sys.executable, "launch.py", "demo", "--run-id", run_id, *options]
        subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
        return folder

    yield ran
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_is_within_its_bands(demo, capsys):
    folder = demo("optimizer.schedule=constant")
    assert compare.main([str(folder), "--expected"]) == 0
    assert "within expectation up to step 10" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_learning_rate_that_is_too_low_leaves_them(demo, capsys):
    folder = demo("optimizer.learning_rate=1e-7")
    assert compare.main([str(folder), "--expected"]) == 1
    assert "step 10: eval/accuracy left its band" in capsys.readouterr().out
