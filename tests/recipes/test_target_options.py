"""Every option of a recipe's cluster, budget, site and storage against every target: it has an effect there,
or it is refused with the targets that obey it."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache

import pytest

from recipes.platforms import options, ssh
from recipes.platforms.targets import TARGETS
from recipes.presets import RECIPES, resolve
from recipes.recipe.spec import Budget, Cluster, Recipe, Site, StorageSite
from tests.recipes.rendered import render
from trainer.config import ConfigError

NAME = "grpo-qwen2.5-vl-7b-mathv60k"
BESIDE = {
    "site.storage_class": ("storage.volume=v",),
    "storage.volume_gib": ("storage.volume=v",),
    "site.topology": ("cluster.nodes=2",),
}
"""What an option needs beside it."""
VALUES = {
    "cluster.nodes": "2",
    "cluster.gpus_per_node": "4",
    "cluster.gpu": "B200",
    "cluster.alternatives": "[B200]",
    "cluster.spot": "only",
    "cluster.image": "own/image:1",
    "site.region": "US/US-KS-2",
    "site.clouds": "[aws]",
    "site.gpu_label": "a.b/card=h100",
    "site.rdma": "rdma/ib:8",
    "site.hosts": "[u@other]",
    "site.walltime_hours": "6",
    "site.prelude": "[module load cuda]",
    "site.offline": "true",
    "site.container": "pyxis",
    "site.pbs": "torque",
    "storage.bucket": "s3://mine/runs",
    "storage.weights": "s3://mine/run/checkpoints/hf",
}
"""A value other than the default; of those that are not named a word or a number."""
PLANNED = ("cluster.gpu", "cluster.alternatives", "cluster.gpus_per_node", "cluster.spot")
"""What machines of a person's own, or a cloud without a spot market, are: the plan and the refusals of shapes
read it, and no file does."""


KINDS = (
    "local", "ssh", "slurm", "pbs", "skypilot", "skypilot-gcp", "skypilot-kubernetes", "dstack-runpod",
    "dstack-ssh", "kubernetes",
)  # fmt: skip
"""One target of each kind."""


def every_option() -> list[str]:
    found = []
    for name, section in (("cluster", Cluster), ("budget", Budget), ("site", Site), ("storage", StorageSite)):
        found += [f"{name}.{field.name}" for field in fields(section)]
    return found


def value_of(option: str) -> str:
    section, _, name = option.partition(".")
    kinds = {"cluster": Cluster, "budget": Budget, "site": Site, "storage": StorageSite}
    default = getattr(kinds[section](), name)
    return VALUES.get(option) or (
        "word" if isinstance(default, str) else "7777"[: 1 + 3 * (section != "budget")]
    )


@cache
def made(target: str, overrides: tuple[str, ...]) -> tuple[Recipe, dict[str, str]]:
    """The recipe, and all that the target is told: its files, and the command that starts a node over ssh."""
    hosts = [] if any(one.startswith("site.hosts") for one in overrides) else ["site.hosts=[u@h0]"]
    if "cluster.nodes=2" in overrides:
        hosts = ["site.hosts=[u@h0,u@h1]"]
    own = hosts if target in ("ssh", "dstack-ssh") else []
    recipe = resolve(NAME, [*overrides, *own])
    files = render(recipe, target)
    if target == "ssh":
        files = files | {"command": "\n".join(ssh.run_command(recipe, 0, {}, "run"))}
    return recipe, files


@pytest.mark.parametrize(
    "targets", [KINDS, pytest.param(TARGETS, marks=pytest.mark.long)], ids=["kinds", "all"]
)
@pytest.mark.parametrize("option", every_option())
def test_an_option_has_an_effect_or_is_refused(option, targets):
    for target in targets:
        beside = BESIDE.get(option, ())
        if "cluster.nodes=2" in (*beside, f"{option}=2") and TARGETS[target].max_nodes == 1:
            continue  # refused as a shape (test_capabilities)
        try:
            _, files = made(target, (*beside, f"{option}={value_of(option)}"))
        except ConfigError as error:
            text = str(error)
            known = any(re.search(rf"\b{other}\b", text) for other in TARGETS if other != target)
            assert known or "leave it out" in text or "set site.region" in text, text
            continue
        assert option in PLANNED or files != made(target, beside)[1], f"{option} does nothing on {target}"


@pytest.mark.parametrize(
    ("target", "option", "able"),
    [
        ("ssh", "budget.max_hourly_usd=9", "skypilot-runpod"),
        ("slurm", "cluster.image=own/image:1", "skypilot-runpod"),
        ("skypilot-gcp", "site.container=pyxis", "slurm"),
        ("skypilot-gcp", "site.grace_s=60", "slurm"),
        ("dstack-gcp", "site.namespace=me", "kubernetes"),
        ("kubernetes", "budget.keep_minutes=9", "skypilot-lambda"),
        ("kubernetes", "site.clouds=[aws]", "skypilot"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_with_a_target_that_obeys_it(target, option, able):
    with pytest.raises(ConfigError, match="does nothing with it: leave it out, or use") as error:
        render(resolve(NAME, [option]), target)
    assert able in str(error.value)


def test_options_of_the_second_group_are_checked_against_its_target():
    base = ["sample.nodes=2", "fleet.workers=only", "sample.target=skypilot-gcp", "sample.gpu=L4"]
    base += ["site.partition=gpu", "site.region=us-central1"]  # each is obeyed by one of the two
    render(resolve(NAME, base), "slurm")
    with pytest.raises(ConfigError, match="sample.constraint is x, and skypilot-gcp does nothing with it"):
        render(resolve(NAME, [*base, "sample.constraint=x"]), "slurm")
    with pytest.raises(ConfigError, match="sample.shm_gib is 9, and skypilot-gcp does nothing with it"):
        render(resolve(NAME, [*base, "sample.shm_gib=9"]), "slurm")


@pytest.mark.parametrize(
    ("target", "there"),
    [("skypilot-gcp", "slurm"), ("skypilot-gcp", "kubernetes"), ("kubernetes", "skypilot-runpod")],
)
def test_an_option_of_the_site_has_an_effect_on_one_of_two_targets_or_is_refused(target, there):
    """As `--fleet 2xL4@OTHER` asks for it."""
    base = ["sample.nodes=2", "fleet.workers=only", f"sample.target={there}", "sample.gpu=L4"]
    before = render(resolve(NAME, base), target)
    refused = []
    for field in fields(Site):
        option = f"site.{field.name}"
        try:
            after = render(resolve(NAME, [*base, f"{option}={value_of(option)}"]), target)
        except ConfigError as error:
            refused.append(option)
            of_group = field.name in options.OF_GROUP
            assert (f"machines that sample have sample.{field.name}" in str(error)) == of_group
            continue
        assert after != before, f"{option} does nothing on {target} and {there}"
    assert 0 < len(refused) < len(fields(Site)) - 5


@pytest.mark.parametrize("name", RECIPES)
def test_presets_are_rendered_wherever_they_are_meant_for(name):
    """What a preset asks for itself is not refused."""
    recipe = RECIPES[name]()
    for target in TARGETS:
        options.check_options(recipe, target)


def test_hours_are_the_runs_own_on_every_target():
    for target in TARGETS:
        files = made(target, ("budget.max_hours=7",))[1]
        assert any("max_hours: 7" in text for text in files.values()), target
