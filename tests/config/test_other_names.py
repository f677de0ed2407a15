"""Keys of other trainers are answered with ours."""

from __future__ import annotations

import dataclasses

import pytest

from recipes.presets import get, resolve
from trainer.config import ConfigError
from trainer.config.other_names import OF_SFT, OURS

RECIPE = "grpo-qwen2.5-vl-7b-mathv60k"


def test_every_answer_is_an_option_that_there_is():
    recipe = get(RECIPE)
    for option in {*OURS.values(), *OF_SFT.values()}:
        section, name = option.split(".")
        holder = recipe if hasattr(recipe, section) else recipe.config
        assert name in {field.name for field in dataclasses.fields(getattr(holder, section))}, option


@pytest.mark.parametrize(
    ("given", "answered"),
    [
        ("optimizer.lr=1e-6", "unknown key optimizer.lr: it is optimizer.learning_rate here"),
        ("lr=1e-6", "it is optimizer.learning_rate here"),
        ("batch_size=64", "it is rollout.prompts_per_step, or sft.batch_size with SFT here"),
        ("actor_rollout_ref.rollout.n=8", "it is rollout.samples_per_prompt here"),
        ("rollout.num_generations=8", "it is rollout.samples_per_prompt here"),
        ("algorithm.beta=0.1", "it is algorithm.kl_coef here"),
        ("algorithm.kl=0.1", "it is algorithm.kl_coef here"),
        ("trainer.n_gpus_per_node=8", "it is cluster.gpus_per_node here"),
        ("clusta.nodes=2", "did you mean cluster?"),
        ("rolout.temperature=1", "did you mean rollout?"),
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
    ],
)
def test_a_wrong_key_is_answered_by_its_meaning(given, answered):
    with pytest.raises(ConfigError, match=answered.replace(".", r"\.").replace("?", r"\?")):
        resolve(RECIPE, [given])


def test_a_cloud_and_a_model_are_enough_to_be_understood():
    from recipes.platforms.targets import target_named

    with pytest.raises(ConfigError, match="did you mean skypilot-runpod or dstack-runpod"):
        target_named("runpod")
    with pytest.raises(ConfigError, match="it is part of grpo-qwen2.5-vl-7b-mathv60k, grpo-"):
        get("qwen2.5-vl-7b")
