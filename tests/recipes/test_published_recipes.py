"""The recipes that copy published runs have every option of the table in docs/published.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get, resolve
from tests.recipes.rendered import render
from trainer import config as c
from trainer.config.expected import check_bands

PAGE = (Path(__file__).parents[2] / "docs/published.md").read_text()
SECTIONS = {
    "Geometry3K, EasyR1": ("grpo-qwen2.5-vl-3b-geometry3k", "grpo-qwen2.5-vl-7b-geometry3k"),
    "MMK12, MM-Eureka": ("grpo-qwen2.5-vl-7b-mmk12",),
    "CLEVR, NeMo-RL": ("grpo-qwen2.5-vl-3b-clevr", "grpo-qwen2.5-vl-3b-counting"),
}
CASES = [(section, name) for section, names in SECTIONS.items() for name in names]


def table(section: str) -> dict[str, str]:
    """Option -> value of a section's first table."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", text, re.MULTILINE))


def test_every_recipe_of_the_page_has_a_section():
    named = set(re.findall(r"`(grpo-[\w.-]+)`", PAGE))
    assert named == {name for _, name in CASES} and named <= RECIPES.keys()


@pytest.mark.parametrize(("section", "name"), CASES)
def test_a_recipe_has_the_published_options(section, name):
    options = table(section)
    assert len(options) >= 8
    config = get(name).config
    # An estimator that is not set is the one of `kl_in`.
    algorithm = replace(config.algorithm, kl_estimator=config.algorithm.kl_estimated_by)
    config = replace(config, algorithm=algorithm)
    assert c.override(config, [f"{key}={value}" for key, value in options.items()]) == config


@pytest.mark.parametrize("name", [name for _, name in CASES])
def test_the_rendered_files_carry_the_bands(name):
    recipe = get(name)
    check_bands(recipe.config.expected)
    assert recipe.config.expected.bands or recipe.config.expected.not_promised
    target = next(target for target in targets_for(recipe) if target != "local")
    text = "".join(render(recipe, target).values())
    assert "expected" in text


def test_geometry3k_promises_what_is_published():
    for size, before, after in (("3b", 24, 38), ("7b", 37, 48)):
        row = re.search(rf"^\| {size.upper()} \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
        assert row and (int(row[1]), int(row[2])) == (before, after)
        first, last = get(f"grpo-qwen2.5-vl-{size}-geometry3k").config.expected.bands[:2]
        assert (first.steps, last.steps) == ((0,), (60,))
        assert first.low[0] < before / 100 < first.high[0] and last.low[0] < after / 100 < last.high[0]


def test_mathv60k_promises_no_curve():
    for name in RECIPES:
        if name.startswith("grpo") and name.endswith("-mathv60k"):
            expected = yaml.safe_load(c.dump(get(name).config))["expected"]
            assert not expected["bands"] and "no accuracy" in expected["not_promised"]


def test_promises_go_with_what_was_changed():
    name = "grpo-qwen2.5-vl-7b-geometry3k"

    def metrics(*overrides: str) -> set[str]:
        return {band.metric for band in resolve(name, list(overrides)).config.expected.bands}

    assert "time/step_s" in metrics("optimizer.learning_rate=1e-3")
    assert metrics("cluster.gpu=A100-80GB") == {"eval/accuracy"}
    assert metrics("model.path=Qwen/Qwen2.5-VL-3B-Instruct") == set()
    assert metrics("algorithm.teacher=Qwen/Qwen2.5-VL-72B-Instruct", "algorithm.kl_coef=0") == set()
    assert metrics("data.source=mmk12") == set()
