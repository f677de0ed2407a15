"""The plan's activations against passes at the recipes' true shapes, on fake tensors."""

from __future__ import annotations

import json

import pytest

from benchmarks.rehearsal import KINDS, OUT, RECIPES, USUAL, WHATS, played, roofline_row, seconds
from recipes.plan import hub_config
from recipes.presets import get
from tests.conftest import ROOT

ONE_READ = "import_utils.py"
"""transformers' check that image tokens and features agree: the only read that waits for the GPU."""
WITHIN = (0.9, 1.1)
"""Peak over plan."""


def check(recipe: str, what: str) -> None:
    """Plays both kinds of rows; the larger peak is the one that is planned for."""
    shape = hub_config.shape(get(recipe).config.model)
    assert shape is not None
    passes = [played(recipe, what, kind) for kind in KINDS]
    for one in passes:
        assert one["parameters"] == shape.parameters
        assert one["mixed"] == {}
        if what == "logprobs":  # on fake CUDA tensors; passes with gradients run on fake CPU ones
            assert [name.split(" at ")[1].split(":")[0] for name in one["waits"]] == [ONE_READ]
            assert list(one["waits"].values()) == [1]
    ratio = max(one["peak_bytes"] / one["planned_bytes"] for one in passes)
    assert WITHIN[0] <= ratio <= WITHIN[1], f"{recipe} {what}: {ratio:.3f} of the plan"


@pytest.mark.slow
def test_three_billion_parameters_score():
    check("grpo-qwen2.5-vl-3b-mathv60k", "logprobs")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_takes_what_is_planned(recipe, what):
    check(recipe, what)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_stays_above_the_roofline_and_the_documents_show_both(recipe, what):
    one = json.loads(OUT.read_text())["passes"][f"{recipe} {what} {USUAL}"]
    roof, planned = seconds(recipe, what, one)
    assert 0.98 <= planned / roof <= 1.5
    assert roofline_row(recipe, what, one) in (ROOT / "docs/memory.md").read_text()
