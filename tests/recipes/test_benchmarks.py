"""What `evaluate --benchmarks` runs."""

import json

import pytest

from recipes.drivers import trained_model
from recipes.plan import cost
from recipes.presets import RECIPES, benchmarks, resolve
from trainer.config import ConfigError, Model, Placement, RunConfig, dump
from trainer.data import prompts


def test_a_recipe_becomes_an_evaluation_of_its_model():
    asked = benchmarks.evaluation_overrides("mathvista, gsm8k", 8, None, 50)
    recipe = resolve("grpo-qwen3-vl-8b-mathv60k", asked)
    (step,) = (step for step in recipe.steps if step.module == "data_prep")
    assert step.args[1:5] == ("mathvista", "gsm8k-test", "--limit", "50")
    c = recipe.config
    assert step.creates == f"{c.data.path}/manifest.json" and c.data.split == "test"
    assert (c.evaluation.pass_rate_samples, c.evaluation.temperature, c.evaluation.benchmarks) == (
        8,
        1.0,
        True,
    )
    assert c.algorithm.kl_coef == 0 and c.evaluation.every_steps == 0, "no reference, no further split"
    greedy = resolve("grpo-qwen2.5-7b-gsm8k", benchmarks.evaluation_overrides("math-500", 1, None, 0)).config
    assert greedy.evaluation.temperature == 0.0
    for name in RECIPES:
        if RECIPES[name]().kind == "train":
            resolve(name, benchmarks.evaluation_overrides("math-500", 1, None, 0))
    with pytest.raises(ConfigError, match="all the same"):
        resolve("grpo-qwen2.5-7b-gsm8k", benchmarks.evaluation_overrides("math-500", 2, 0.0, 0))


def test_no_teacher_and_no_rollout_worker_is_asked_for():
    asked = benchmarks.evaluation_overrides("math-500", 1, None, 0)
    assert not resolve("opd-qwen3-vl-8b-from-32b-geometry3k", asked).config.teaches
    workers = ["fleet.workers=only", "sample.gpu=L40S", "sample.nodes=2"]
    recipe = resolve("grpo-qwen2.5-vl-7b-mathv60k", [*workers, *asked])
    assert recipe.sample is None and recipe.config.fleet.workers == "off"


def test_every_benchmark_is_a_set_of_the_catalog():
    from data_prep.sources.catalog import CATALOG

    assert all(CATALOG[name].evaluation for name in benchmarks.BENCHMARKS.values())
    with pytest.raises(ConfigError, match="did you mean mathvista"):
        benchmarks.evaluation_overrides("mathvist", 1, None, 0)
    with pytest.raises(ConfigError, match="name some of"):
        benchmarks.evaluation_overrides("", 1, None, 0)


def test_a_benchmark_may_be_asked_in_its_own_words():
    settings = benchmarks.evaluation_overrides("math-500", 1, None, 0, "published")
    config = resolve("grpo-qwen2.5-7b-gsm8k", settings).config
    assert (config.data.system_prompt, config.rewards.answer) == ("published", "any")
    ours = resolve("grpo-qwen2.5-7b-gsm8k", benchmarks.evaluation_overrides("math-500", 1, None, 0)).config
    assert (ours.data.system_prompt, ours.rewards.answer) == ("rows", "block")
    assert prompts.BEFORE.keys() | prompts.AFTER.keys() <= set(benchmarks.BENCHMARKS.values())


def test_a_model_runs_on_the_machine_of_its_recipe(tmp_path, monkeypatch):
    assert trained_model.what_to_evaluate("demo", "", None) == ("demo", [])
    hub = "Qwen/Qwen3-VL-32B-Instruct"
    assert trained_model.what_to_evaluate(hub, "", None) == (
        "grpo-qwen3-vl-32b-mathv60k",
        [f"model.path={hub}"],
    )
    assert trained_model.what_to_evaluate("me/mine", "s3://results", None)[0] == benchmarks.FALLBACK
    assert trained_model.is_foreign_model(hub, "", None) and not trained_model.is_foreign_model(
        "demo", "", None
    )
    weights = tmp_path / "runs/mine/hf"
    weights.mkdir(parents=True)
    text = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "intermediate_size": 18944, "vocab_size": 152064, "model_type": "qwen2"}  # fmt: skip
    (weights / "config.json").write_text(json.dumps(text))
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "runs/mine", str(tmp_path / "runs/mine"), str(weights)):
        recipe, own = trained_model.what_to_evaluate(name, "", None)
        assert recipe == "grpo-qwen2.5-7b-gsm8k" and f"model.path={weights}" in own
    saved = RunConfig(model=Model(path=str(weights)), placement=Placement(device="cpu"))
    (tmp_path / "runs/mine/config.yaml").write_text(dump(saved))
    recipe, own = trained_model.what_to_evaluate(str(tmp_path / "runs/mine"), "", "local")
    assert "setup=cpu" in own and resolve(recipe, own).config.placement.device == "cpu"
    with pytest.raises(ConfigError, match="no recipe, run with weights"):
        trained_model.what_to_evaluate("nothing", "", None)


def test_a_file_of_rows_is_a_benchmark_of_one_s_own(tmp_path):
    mine = tmp_path / "own rows.jsonl"
    mine.write_text('{"q": "1 + 1?", "gold": "2", "level": "easy"}\n')
    mapping = "question=q,answer=gold,source=level"
    asked = benchmarks.evaluation_overrides(f"{mine},gsm8k", 1, None, 0, mapping=mapping)
    recipe = resolve("grpo-qwen2.5-7b-gsm8k", asked)
    (step,) = (step for step in recipe.steps if step.module == "data_prep")
    assert step.args[1:3] == (str(mine), "gsm8k-test")
    assert step.args[3:8] == ("--evaluation", "--split", "test", "--map", mapping)
    alone = resolve(
        "grpo-qwen2.5-7b-gsm8k", benchmarks.evaluation_overrides(str(mine), 1, None, 0, mapping=mapping)
    )
    assert cost.steps_of(alone) >= 1, "one row is enough: nothing is trained"
    with pytest.raises(ConfigError, match="--benchmarks names none"):
        benchmarks.evaluation_overrides("gsm8k", 1, None, 0, mapping=mapping)


def test_its_rows_are_kept_with_their_categories(tmp_path):
    from data_prep import commands
    from trainer.data.dataset import Dataset

    mine = tmp_path / "own.jsonl"
    mine.write_text(
        '{"q": "1 + 1?", "gold": "2", "level": "easy"}\n{"q": "1 + 1?", "gold": "2", "level": "hard"}\n'
    )
    words = ["--evaluation", "--split", "test", "--map", "question=q,answer=gold,source=level"]
    assert commands.main(["prepare", str(mine), *words, "--out", str(tmp_path / "out")]) == 0
    rows = list(Dataset(tmp_path / "out", "test"))
    assert [row.source for row in rows] == ["own/easy", "own/hard"]
