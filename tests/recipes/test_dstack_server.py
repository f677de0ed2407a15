"""Every dstack task planned by a real dstack server: accepted as it stands, with the offers and prices of a
catalog."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get
from tests.recipes.rendered import render

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
NAMESPACE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Nothing of the server outlives the test, and no packet leaves the machine."""
TARGETS = ("dstack-runpod", "dstack-gcp", "dstack-kubernetes")


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """What the server said to every file, and to one task that asks RunPod for spot nodes."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a network namespace")
    if not LAUNCH.exists():
        pytest.skip("no .venvs/launch: bash trainer/shell/setup.sh launch")
    files = {}
    for name in RECIPES:
        for target in targets_for(get(name)):
            if target in TARGETS:
                files |= {f"{target}/{file}": text for file, text in render(get(name), target).items()}
    task = files["dstack-runpod/grpo-qwen2.5-vl-72b-mathv60k.yaml"]
    files["spot.yaml"] = task.replace("spot_policy: on-demand", "spot_policy: spot")
    files["dear.yaml"] = re.sub(r"max_price: \S+", "max_price: 0.5", task)
    command = [
        *NAMESPACE,
        str(LAUNCH),
        str(ROOT / "tests/recipes/dstack_lab.py"),
        str(tmp_path_factory.mktemp("dstack")),
        sys.executable,
    ]
    done = subprocess.run(command, input=json.dumps(files), text=True, capture_output=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def said(answer):
    return answer["plans"]


pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_every_file_is_accepted(said):
    assert {name: plan for name, plan in said.items() if "error" in plan} == {}
    assert sum("offers" in plan for plan in said.values()) > 30


@pytest.mark.parametrize(
    "name", ["grpo-qwen2.5-vl-32b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k", "preflight"]
)
def test_runpod_offers_instant_clusters_on_demand(said, name):
    plan = said[f"dstack-runpod/{name}.yaml"]
    assert plan["offers"] == 2 and plan["gpus"] == ["A100", "H100"] and not plan["spot"]
    assert plan["price"] == pytest.approx(8 * 1.79)  # the cheaper of the catalog, per node


def test_runpod_offers_pods_to_one_node(said):
    plan = said["dstack-runpod/grpo-qwen2.5-vl-7b-mathv60k.yaml"]
    assert plan["offers"] == 2 and plan["price"] == pytest.approx(8 * 1.79)


def test_runpod_has_no_spot_and_respects_the_price_limit(said):
    assert said["spot.yaml"]["offers"] == 0
    assert said["dear.yaml"]["offers"] == 0


def test_a_person_launches_looks_and_ends(answer):
    said = answer["by hand"]
    code, text = said["no secrets"]
    assert code == 2 and "launch.py: dstack has no secret aws_access_key_id, aws_secret_access_key" in text
    code, text = said["up"]
    assert code == 0 and "Run mine submitted" in text and "$1.79" in text and "stand-in" not in text
    assert said["status"][0] == 0 and re.search(
        r"dstack run mine: (submitted|pending|provisioning)", said["status"][1]
    )
    assert (said["logs"][0], said["down"][0]) == (0, 0)
    assert re.search(r" 0\.00 [\s\S]*mine: terminat(ing|ed) \(stopped_by_user\)", said["after"][1])
