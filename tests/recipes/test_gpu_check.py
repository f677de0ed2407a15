"""The first hour on a card as a command: what is chosen, how a check ends, and which constants are off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from recipes import gpu_check
from recipes.commands import cli
from recipes.gpu_check import CHECKS, DEMO, Runner, chosen_checks
from recipes.plan import cost
from recipes.presets import get, resolve
from tests.conftest import ROOT
from tests.recipes.rendered import render
from trainer import config as configuration
from trainer.config import ConfigError
from trainer.config.run_folder import GPU_CHECK, GPU_CHECK_PAGE


def check_config(tmp_path, *assignments: str):
    """The check's own configuration on this machine's CPU."""
    config = get("gpu-check").config
    return configuration.override(
        config, [f"run.dir={tmp_path}/run", "run.id=mine", "placement.device=cpu", *assignments]
    )


def figures(**values: float) -> dict:
    """As a check writes them: one figure for each constant."""
    return {
        "device": "a card",
        "figures": {
            f"what {name} is": {"value": value, "unit": "", "constant": name}
            for name, value in values.items()
        },
    }


# --- what is asked ------------------------------------------------------------------------------------------


def test_every_case_belongs_to_one_check():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-v", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    cases = re.findall(r"<Function (\S+)>", done.stdout)
    assert len(cases) > 15, done.stdout + done.stderr

    def named(case: str, expression: str) -> bool:
        return Expression.compile(expression).evaluate(lambda name, **_: name.lower() in case.lower())

    expressions = {check.name: check.cases for check in CHECKS if check.cases}
    for case in cases:
        of = [name for name, expression in expressions.items() if named(case, expression)]
        # The demo runs as a part of the launch, on all GPUs of all nodes.
        assert len(of) == (0 if "demo_learns" in case else 1), (case, of)
    for name, expression in expressions.items():
        assert any(named(case, expression) for case in cases), name


def test_several_nodes_share_the_demo_and_one_card_has_no_peers(tmp_path):
    config = check_config(tmp_path, "placement.device=cuda", "placement.workers_per_node=1")
    alone = [check.name for check in chosen_checks("", config)]
    assert "several" not in alone and {"attention", DEMO, "decode"} <= set(alone)
    eight = configuration.override(config, ["placement.workers_per_node=8"])
    assert "several" in [check.name for check in chosen_checks("", eight)]
    nodes = configuration.override(eight, ["placement.nodes=2"])
    assert [check.name for check in chosen_checks("", nodes)] == [DEMO]
    assert [check.name for check in chosen_checks("decode,parity", config)] == ["parity", "decode"]
    with pytest.raises(
        ConfigError, match="no check is called nap: choose among graphs, three-billion, sleep"
    ):
        chosen_checks("nap", config)


def test_it_costs_less_than_five_dollars_on_an_h100():
    recipe = get("gpu-check")
    found = cost.node_prices(recipe, "skypilot-runpod")
    usd, gpu, spot = max(found)
    assert gpu == "H100" and not spot
    assert usd * recipe.budget.max_hours < 5


def test_the_most_that_it_costs_is_said_before_anything_is_rented(capsys, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    cli.main(["up", "gpu-check", "--target", "skypilot-runpod", "--bucket", "s3://mine/runs", "--dry-run"])
    said = capsys.readouterr().out
    rate, most = re.search(r"\$([\d.]+) per hour, \$([\d.]+) at most", said).groups()
    assert float(most) == pytest.approx(1.25 * float(rate), abs=0.01)
    assert "setting them up come on top" in said, "its hours are counted from the first check on"


def test_its_machine_runs_the_checks_through_the_launcher_and_goes_down():
    text = next(iter(render(get("gpu-check"), "skypilot-runpod").values()))
    assert "-m trainer.node" in text and "-m recipes.gpu_check" in text and "--hours 1.25" in text
    assert "BUCKET: null" in text  # asked for at launch
    recipe = resolve("gpu-check", ["cluster.gpus_per_node=8", "cluster.nodes=2"])
    assert recipe.config.placement.world_size == 16


# --- how a check ends ---------------------------------------------------------------------------------------


def test_a_check_that_hangs_ends_with_all_that_it_started(tmp_path):
    runner = Runner(check_config(tmp_path), tmp_path / "run.yaml", 1.0)
    pids = tmp_path / "pids"
    # In a session of its own, as Ray's processes are.
    script = f"setsid sleep 300 & echo $! > {pids}; echo begun; sleep 300"
    code, printed = runner.process("slow", ["bash", "-c", script], {}, 1.0)
    assert code is None and "begun" in printed
    pid = pids.read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    assert not state.strip() or state.startswith("Z")


def test_a_late_check_leaves_its_output_and_no_files(tmp_path, capsys, monkeypatch):
    runner = Runner(check_config(tmp_path), tmp_path / "run.yaml", 1.0)
    asked = []

    def late(check, command, env, seconds):
        scratch = Path(next(part for part in command if part.startswith("--basetemp=")).partition("=")[2])
        (scratch / "test_one").mkdir(parents=True)
        (scratch / "test_one/parity-1-0.log").write_text("Capturing CUDA graphs: 7 of 11\n")
        asked.append((command, env, scratch))

    monkeypatch.setattr(runner, "process", lambda *given: late(*given) or (None, ""))
    assert runner.cases(CHECKS[0], 100.0) == "too slow"
    ((command, env, scratch),) = asked
    assert "Capturing CUDA graphs: 7 of 11" in capsys.readouterr().out and not scratch.exists()
    assert "-s" in command and "faulthandler_timeout=85" in command and env["PYTHONUNBUFFERED"] == "1"
    assert env["SPOTRL_GPU_MODELS"].startswith(str(tmp_path)), "weights that checks share"
    for code, printed, outcome in (
        *((1, "1 failed, 2 passed", "failed"), (5, "18 deselected", "failed")),  # a name of nothing
        *((0, "2 passed, 1 skipped in 3s", "passed"), (0, "1 skipped in 3s", "skipped")),
    ):
        monkeypatch.setattr(runner, "process", lambda *_, ended=(code, printed): ended)
        assert runner.cases(CHECKS[0], 100.0) == outcome


def test_the_first_checks_fit_a_card_of_half_an_hour():
    """By their limits alone."""
    first = [check.name for check in CHECKS[:6]]
    assert first == ["graphs", "three-billion", "sleep", "gradients", "recurrence", DEMO]
    assert sum(check.limit_s for check in CHECKS[:6]) <= 1800


def test_hours_that_are_over_end_it(tmp_path, capsys):
    runner = Runner(check_config(tmp_path), tmp_path / "run.yaml", 0.0)
    assert runner.run(CHECKS[:2]) == 1
    said = json.loads((tmp_path / "run" / GPU_CHECK).read_text())
    assert {check["outcome"] for check in said["checks"]} == {"not begun: the hours are over"}
    assert "[2/2] three-billion: not begun" in capsys.readouterr().out


# --- constants of the plan that a card showed otherwise -----------------------------------------------------


def test_every_constant_is_measured_by_a_check():
    text = "".join(path.read_text() for path in (ROOT / "tests/gpu").glob("*.py"))
    assert set(re.findall(r'constant="([A-Z_]+)"', text)) == set(gpu_check.CONSTANTS)


def test_the_page_names_what_is_off_and_reaches_the_bucket(tmp_path):
    config = check_config(tmp_path, f"checkpoint.remote=file://{tmp_path}/bucket")
    runner = Runner(config, tmp_path / "run.yaml", 1.0)
    runner.write(figures(ENGINE_ASLEEP=4.0, MATMUL=0.41))
    runner.end(CHECKS[0], "passed", 3.0)
    page = (tmp_path / "bucket/mine" / GPU_CHECK_PAGE).read_text()
    assert page == (tmp_path / "run" / GPU_CHECK_PAGE).read_text() and "| graphs | passed |" in page
    assert "- ENGINE_ASLEEP: 1.5 assumed, 4 measured" in page and "- MATMUL" not in page
