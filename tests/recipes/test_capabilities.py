"""A recipe that a target cannot run is refused with the target that can."""

import re

import pytest
import yaml

from recipes.platforms import targets
from recipes.platforms.targets import TARGETS, refusal
from recipes.presets import RECIPES, get, resolve
from recipes.recipe.spec import override
from tests.recipes.rendered import render
from trainer.config import ConfigError


@pytest.mark.parametrize(
    ("name", "target", "overrides", "message"),
    [
        ("grpo-qwen2.5-vl-72b-mathv60k", "skypilot-runpod", [], "runs one node.*wants 4: use dstack-runpod"),
        ("grpo-qwen2.5-vl-7b-mathv60k", "dstack-runpod", ["cluster.spot=only"], "use skypilot-runpod"),
        (
            "grpo-qwen2.5-vl-72b-mathv60k",
            "dstack-runpod",
            ["cluster.nodes=16", "algorithm.samples_per_update=0"],
            "at most 8 nodes",
        ),
        ("grpo-qwen2.5-vl-72b-mathv60k", "slurm", ["cluster.spot=only"], "no spot nodes.*use skypilot-gcp"),
        (
            "grpo-qwen2.5-vl-72b-mathv60k",
            "dstack-runpod",
            ["cluster.spot=only"],
            "use skypilot-gcp or dstack-gcp",
        ),
        (
            "grpo-qwen2.5-vl-7b-mathv60k",
            "skypilot-gcp",
            ["cluster.gpu=MI300X", "cluster.alternatives=[]"],
            "has no MI300X",
        ),
        (
            "grpo-qwen2.5-vl-7b-mathv60k",
            "skypilot-gcp",
            ["cluster.gpus_per_node=3", "rollout.tensor_parallel=1", "rollout.prompts_per_step=63"],
            "with 3 per node",
        ),
        (
            "grpo-qwen2.5-vl-7b-mathv60k",
            "skypilot",
            ["cluster.gpu=L40S", "cluster.alternatives=[]", "site.clouds=[gcp,azure]"],
            "skypilot-gcp has no L40S.*; skypilot-azure has no L40S",
        ),
        ("grpo-qwen2.5-vl-7b-mathv60k", "skypilot", ["cluster.gpu=GH200"], "GH200 has an ARM processor"),
        ("demo", "dstack-runpod", [], "rents machines with GPUs"),
        ("demo", "skypilot-azur", [], "unknown target skypilot-azur: did you mean skypilot-azure"),
        ("grpo-qwen2.5-vl-7b-mathv60k", "skypilot-runpod", ["storage.mount=/bucket"], "does nothing with it"),
        ("grpo-qwen2.5-vl-7b-mathv60k", "skypilot-runpod", ["storage.volume=v"], "set site.region"),
    ],
)
def test_refused_with_the_target_that_can(name, target, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        render(override(get(name), overrides), target)
    assert "\n" not in str(caught.value)


def test_what_is_offered_instead_can_run_it():
    for name in RECIPES:
        for target in TARGETS:
            try:
                targets.check_target(get(name), target)
            except ConfigError as error:
                for other in re.findall(r"(?:use|or) ((?:skypilot|dstack)-\w+|slurm|pbs|ssh)", str(error)):
                    assert not refusal(get(name), other), f"{name} on {target}: {error}"


@pytest.mark.parametrize(
    ("card", "more", "infra"),
    [
        ("L40S", ["site.clouds=[gcp,runpod]"], "runpod"),
        ("L40S", ["site.clouds=[nebius]", "cluster.gpus_per_node=4"], "nebius"),
        ("MI300X", ["cluster.image=rocm/vllm:1"], "runpod"),
    ],
)
def test_a_chooser_takes_cards_of_any_of_its_clouds(card, more, infra):
    given = [f"cluster.gpu={card}", "cluster.alternatives=[]", "cluster.nodes=1", *more]
    task = yaml.safe_load(next(iter(render(resolve("preflight", given), "skypilot").values())))
    places = task["resources"].get("ordered", [task["resources"]])
    assert {place["infra"] for place in places} == {infra} and card in str(places[0]["accelerators"])
