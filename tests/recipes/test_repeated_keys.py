"""What the repeated keys of an update take."""

import pytest

from recipes.plan import activations, hub_config, memory
from recipes.presets import get
from recipes.recipe.spec import override
from trainer.config import budget

RECIPE = "grpo-qwen2.5-vl-72b-mathv60k"


@pytest.mark.parametrize(("name", "least"), [(RECIPE, 10.0), ("grpo-qwen2.5-vl-7b-mathv60k", 16.0)])
def test_keys_take_what_their_limit_says_and_the_plan_counts_them(name, least):
    recipe = memory.with_rows(get(name))
    config, shape = recipe.config, hub_config.shape(recipe.config.model)
    assert shape is not None
    tokens = budget.micro_batch_tokens(config, shape)
    keys = budget.keys_per_token(config, shape, tokens)
    # K and V of every key, and the gradients of both, of the layer that is computed again
    assert keys * tokens * 2 * shape.kv_heads * shape.head_dim * 2 * 2 == pytest.approx(budget.KEY_BYTES)
    assert keys >= least
    group = config.rollout.samples_per_prompt
    batch = activations.micro_batch(config, shape)
    counted = budget.repeated_keys(config, shape, batch.tokens)
    assert counted == min(budget.KEY_BYTES, (1 + group) * batch.tokens * 8 * shape.kv_heads * shape.head_dim)
    need = memory.plan_memory(recipe)
    assert need is not None
    at_work = [phase.parts["repeated keys"] for phase in need.phases if "repeated keys" in phase.parts]
    assert at_work == [counted / 2], "their gradients come when the MLP's are gone"


def test_a_model_that_keeps_every_layer_keeps_every_layers_keys():
    recipe = get("grpo-qwen2.5-vl-7b-mathv60k")
    config, shape = recipe.config, hub_config.shape(recipe.config.model)
    assert shape is not None
    whole = override(recipe, ["model.gradient_checkpointing=false"]).config
    once = budget.key_bytes(config, shape, gradients=False)
    assert budget.key_bytes(config, shape, gradients=True) == 2 * once
    assert budget.key_bytes(whole, shape, gradients=True) == (shape.layers + 1) * once
    assert budget.keys_per_token(whole, shape, 1 << 20) == budget.LEAST_KEYS
