"""Every recipe resolves, is valid, and says what it is made of."""

import dataclasses

import pytest

from recipes.drivers import launch_checks
from recipes.plan.resolving import resolve_groups
from recipes.platforms.targets import target_named
from recipes.presets import RECIPES, get, resolve
from recipes.recipe import recipe_files
from recipes.recipe.spec import Recipe, override, validate
from trainer import config as run_config
from trainer.config import ConfigError

NAME_72B = "grpo-qwen2.5-vl-72b-mathv60k"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid(name):
    recipe = get(name)
    validate(recipe)
    placement = recipe.config.placement
    assert recipe.name == name
    assert placement.nodes == recipe.cluster.nodes
    if recipe.cluster.gpus_per_node:
        assert placement.workers_per_node == recipe.cluster.gpus_per_node and placement.device == "cuda"


def test_the_72b_recipe_has_the_original_options():
    config = get(NAME_72B).config
    assert (config.placement.nodes, config.placement.workers_per_node) == (4, 8)
    assert config.placement.world_size // config.rollout.tensor_parallel == 4  # engines of TP 8 on 32 GPUs
    assert (
        config.rollout.prompts_per_step,
        config.rollout.samples_per_prompt,
        config.rollout.max_tokens,
    ) == (
        64,
        4,
        8000,
    )
    assert (config.data.max_samples, config.data.episodes, config.data.prompt_max_tokens) == (1000, 2, 4096)
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimated_by, config.algorithm.gamma) == (
        1e-3,
        "k3",
        1.0,
    )
    assert config.algorithm.normalize_reward
    assert config.algorithm.samples_per_update == 0, "one update of the whole rollout"
    original = run_config.override(config, ["algorithm.samples_per_update=64", f"run.name={NAME_72B}-orig"])
    assert get(f"{NAME_72B}-orig").config == original
    assert config.optimizer.learning_rate == 5e-7 and config.rollout.gpu_memory_utilization == 0.4
    assert config.checkpoint.keep_last == 2 and config.model.gradient_checkpointing


def test_override_reaches_recipe_and_configuration():
    recipe = override(
        get("grpo-qwen2.5-vl-7b-mathv60k"), ["cluster.nodes=2", "rollout.max_tokens=99", "site.hosts=[a,b]"]
    )
    assert recipe.cluster.nodes == 2 and recipe.config.placement.nodes == 2
    assert recipe.config.rollout.max_tokens == 99 and recipe.site.hosts == ("a", "b")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rollout.max_token=1", "did you mean rollout.max_tokens?"),
        ("cluster.node=1", "did you mean cluster.nodes?"),
        ("clutser.nodes=1", "did you mean cluster?"),
        ("placement.nodes=2", "set cluster.nodes"),
        ("cluster.spot=maybe", "is not one of prefer, only, never"),
        ("cluster.nodes=x", "expected int"),
    ],
)
def test_override_refuses(assignment, message):
    with pytest.raises(ConfigError, match=message):
        override(get("grpo-qwen2.5-vl-7b-mathv60k"), [assignment])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("cluster.gpu=H1000", "unknown GPU H1000: did you mean H100"),
        ("cluster.nodes=0", "cluster.nodes is 0: it must be at least 1"),
        ("cluster.gpus_per_node=17", "cluster.gpus_per_node is 17: it must be at least 0 and at most 16"),
        ("budget.max_hours=-5", "budget.max_hours is -5.0: it must be above 0"),
        ("budget.max_hourly_usd=.nan", "budget.max_hourly_usd is nan"),
        ("site.grace_s=-1", "site.grace_s is -1"),
        ("storage.bucket=ftp://x", "write it as s3://"),
        ("rollout.tensor_parallel=3", "does not divide"),
        ("run.deterministic=cuda", "needs a GPU among H100, H200, B200, and the recipe takes A100-80GB"),
    ],
)
def test_validation_refuses(assignment, message):
    with pytest.raises(ConfigError, match=message):
        validate(override(get("grpo-qwen2.5-vl-7b-mathv60k"), [assignment]))


def test_repeatable_kernels_are_refused_for_models_that_have_none():
    newer = ["run.deterministic=cuda", "cluster.gpu=H100", "cluster.alternatives=[H200]"]
    validate(override(get("grpo-qwen2.5-vl-7b-mathv60k"), newer))
    with pytest.raises(
        ConfigError, match="no repeatable kernels for the gated delta-net layers of Qwen/Qwen3.5-9B"
    ):
        validate(override(get("grpo-qwen3.5-9b-mathv60k"), newer))


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean grpo-qwen2.5-vl-7b-mathv60k"):
        get("grpo-qwen2.5-vl-7b-mathv60")


def test_every_field_is_documented():
    import inspect

    from recipes.recipe import spec

    for cls in (spec.Cluster, spec.DataFacts, spec.StorageSite, spec.Budget, spec.Site, Recipe):
        source = inspect.getsource(cls)
        for field in dataclasses.fields(cls):
            after = source.split(f"\n    {field.name}: ")[1].split("\n", 1)[1]
            assert after.lstrip().startswith('"""'), f"{cls.__name__}.{field.name}"


def test_own_rows_take_the_place_of_the_dataset(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": 2}\n')
    monkeypatch.chdir(tmp_path)
    name, given = recipe_files.expand_paths(
        "grpo-qwen2.5-vl-7b-mathv60k", ["data.source=mine.jsonl --map 'answer=answer'"]
    )
    recipe = resolve(name, given)
    (step,) = recipe.steps
    path = "${DATA}/${RUN_ID}"
    assert step.args == ("prepare", f"{tmp_path}/mine.jsonl", "--map", "answer=answer", "--out", path)
    assert (step.creates, recipe.config.data.path) == (f"{path}/manifest.json", path)
    assert recipe.config.evaluation.split == "validation" and recipe.dataset.name == "mine"
    assert resolve(name, [*given, "evaluation.split=test"]).config.evaluation.split == "test"
    named = resolve(name, ["data.source=me/mine --revision main", "data.path=${DATA}/x"])
    assert named.steps[0].args == ("prepare", "me/mine", "--revision", "main", "--out", "${DATA}/x")
    demo = resolve("demo", ["data.source=generated --rows 50"])
    assert [step.module for step in demo.steps] == [
        "data_prep",
        "examples.demo.shapes",
        "examples.demo.warm_start",
    ]
    with pytest.raises(
        ConfigError, match="nodes of skypilot-runpod do not have it: put the rows into a bucket"
    ):
        many = dataclasses.replace(recipe, dataset=dataclasses.replace(recipe.dataset, rows=6400))
        launch_checks.check_launch(resolve_groups(many, "skypilot-runpod"), False)
    with pytest.raises(ConfigError, match="there is no file other.jsonl where you are"):
        resolve(name, ["data.source=other.jsonl"])
    with pytest.raises(ConfigError, match="the run itself says where its rows go"):
        resolve(name, ["data.source=me/mine --out x"])
    with pytest.raises(ConfigError, match="launch.py up RECIPE --set data.source="):
        run_config.validate(run_config.override(run_config.RunConfig(), ["data.source=me/mine"]))


def test_the_list_of_one_family_of_models(capsys):
    from recipes.commands.cli import main

    assert main(["list", "--model", "Qwen3-VL"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("grpo")]
    sizes = ("2b", "4b", "8b", "30b-a3b", "32b")
    assert shown == [f"grpo-qwen3-vl-{size}-mathv60k" for size in sizes]
    assert main(["list", "--model", "gemma"]) == 2
    said = capsys.readouterr().err
    assert "no recipe trains a model called gemma: give one of Qwen2.5-VL, Qwen2-VL" in said


@pytest.mark.parametrize("size", ["2b", "8b"])
def test_an_image_token_of_qwen3_vl_is_32_pixels_wide(size):
    model = get(f"grpo-qwen3-vl-{size}-mathv60k").config.model
    assert (model.min_pixels, model.max_pixels) == (4 * 32 * 32, 1280 * 32 * 32)


def test_every_number_of_a_recipe_has_a_range():
    recipe = get("demo")
    for section in (recipe.cluster, recipe.dataset, recipe.storage, recipe.budget, recipe.site):
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert "range" in f.metadata, f"{type(section).__name__}.{f.name}"


def test_a_cloud_and_a_model_are_enough_to_be_understood():
    with pytest.raises(ConfigError, match="did you mean skypilot-runpod or dstack-runpod"):
        target_named("runpod")
    with pytest.raises(ConfigError, match="it is part of grpo-qwen2.5-vl-7b-mathv60k, grpo-"):
        get("qwen2.5-vl-7b")
