"""SkyPilot tasks through `sky launch --dryrun` on a real API server: what its optimizer chooses and
refuses."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get
from recipes.recipe.spec import override
from tests.recipes.rendered import render

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
NAMESPACE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Nothing of the server outlives the test, and no packet leaves the machine."""
TARGETS = ("skypilot-runpod", "skypilot-gcp", "skypilot")
pytestmark = [pytest.mark.lab, pytest.mark.slow]


def task(name, target, *overrides):
    return next(iter(render(override(get(name), list(overrides)), target).values()))


def asked(text):
    """What a task asks for; tasks that ask for the same stand for each other."""
    data = yaml.safe_load(text)
    return json.dumps([data["num_nodes"], data["resources"]], sort_keys=True)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the server said to one task of each kind, and to some that it must refuse."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a network namespace")
    if not LAUNCH.exists():
        pytest.skip("no .venvs/launch: bash trainer/shell/setup.sh launch")
    files, kinds = {}, {}
    for target in TARGETS:
        for name in RECIPES:
            if target in targets_for(get(name)):
                text = task(name, target)
                kinds.setdefault(asked(text), f"{target}/{name}")
                files[f"{target}/{name}"] = text
    sent = {where: files[where] for where in kinds.values()}
    one = files["skypilot-runpod/grpo-qwen2.5-vl-3b-mathv60k"]
    sent["two nodes on RunPod"] = one.replace("num_nodes: 1", "num_nodes: 2")
    sent["on demand"] = task("grpo-qwen2.5-vl-7b-mathv60k", "skypilot", "cluster.spot=never")
    sent["too much memory"] = re.sub(
        r"memory: \d+", "memory: 9000", files["skypilot-gcp/grpo-qwen2.5-vl-3b-mathv60k"]
    )
    command = [*NAMESPACE, str(LAUNCH), "tests/recipes/sky_lab.py", str(tmp_path_factory.mktemp("sky"))]
    done = subprocess.run(
        command, input=json.dumps(sent), text=True, capture_output=True, timeout=1500, cwd=ROOT
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr[-3000:]
    plans = json.loads(done.stdout.strip().splitlines()[-1])["plans"]
    return plans | {where: plans[kinds[asked(text)]] for where, text in files.items()}


def test_every_recipe_finds_machines(said):
    found = {where: plan for where, plan in said.items() if "/" in where}
    assert len(found) > 25
    assert {where: plan for where, plan in found.items() if not plan.get("chosen")} == {}


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("skypilot-runpod/grpo-qwen2.5-vl-3b-mathv60k", "1x_H100-SXM_SECURE"),
        ("skypilot/grpo-qwen2.5-vl-7b-mathv60k", "8x_H100-SXM_SECURE"),
        ("skypilot-gcp/grpo-qwen2.5-vl-72b-mathv60k", "a3-highgpu-8g[Spot]"),
        ("skypilot-runpod/demo", "cpu3g-4-16"),
        ("on demand", "8x_H100-SXM_SECURE"),
    ],
)
def test_the_place_where_the_run_will_cost_least_is_chosen(said, where, chosen):
    assert chosen in said[where]["chosen"].split()


@pytest.mark.parametrize("where", ["two nodes on RunPod", "too much memory"])
def test_what_we_refuse_the_server_refuses_too(said, where):
    assert "error" in said[where] and "ResourcesUnavailableError" in said[where]["error"]
