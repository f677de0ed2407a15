"""A recipe whose model, rows or machines were changed: what it is called, and what it still prepares."""

import re

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.presets import resolve


@pytest.mark.parametrize(
    ("given", "name", "description"),
    [
        (["model.path=Qwen/Qwen2.5-VL-32B-Instruct"], "grpo-qwen2.5-vl-32b-mathv60k",
         "GRPO of Qwen2.5-VL-32B on mathv60k (1 x 8)"),
        (["cluster.nodes=2"], "grpo-qwen2.5-vl-7b-mathv60k", "GRPO of Qwen2.5-VL-7B on mathv60k (2 x 8)"),
        (["model.path=/runs/warm/hf"], "grpo-warm-mathv60k", "GRPO of warm on mathv60k (1 x 8)"),
        (["model.path=/a/model-with-a-name-of-30-letters"], "grpo-qwen2.5-vl-7b-mathv60k",
         "GRPO of model-with-a-name-of-30-letters on mathv60k (1 x 8)"),
        (["run.seed=3"], "grpo-qwen2.5-vl-7b-mathv60k", "GRPO of Qwen2.5-VL-7B on mathv60k (1 x 8)"),
    ],
)  # fmt: skip
def test_a_changed_model_or_cluster_is_in_name_and_heading(given, name, description):
    recipe = resolve("grpo-qwen2.5-vl-7b-mathv60k", given)
    assert (recipe.name, recipe.config.run.name, recipe.description) == (name, name, description)


def test_the_demo_of_another_model_says_so():
    assert resolve("demo", ["model.path=/m/SmolLM2"]).description == "GRPO of SmolLM2 on shapes (2 CPU ranks)"
    assert resolve("demo", ["model.path=/m/SmolLM2"]).name == "demo"
    assert resolve("demo", ["model.path=/m/SmolLM2", "run.name=mine"]).config.run.name == "mine"


def test_the_demo_of_another_model_or_of_other_rows_makes_only_what_it_reads(capsys, tmp_path):
    def modules(*overrides):
        code, out, _ = run(
            capsys, "demo", "--dry-run", *[part for text in overrides for part in ("--set", text)]
        )
        assert code == 0
        return re.findall(r"-m (examples\.demo\.\w+)", out)

    manifest = '{"rows": {"train": 64, "validation": 8}}'
    for name, mark, text in (("model", "config.json", "{}"), ("rows", "manifest.json", manifest)):
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).write_text(text)
    shapes, warm = "examples.demo.shapes", "examples.demo.warm_start"
    assert modules() == [shapes, warm]
    assert modules(f"model.path={tmp_path}/model") == [shapes]
    assert modules(f"data.path={tmp_path}/rows") == [shapes, warm], "the warm start is made from the shapes"
    assert modules(f"data.path={tmp_path}/rows", f"model.path={tmp_path}/model") == []
