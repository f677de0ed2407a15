"""How long ranks wait in a recipe's updates, what the plan proposes, and what the repeated keys take."""

import pytest

from recipes.plan import activations, hub_config, memory, rank_balance
from recipes.presets import get
from recipes.recipe.spec import override
from tests.recipes.desk import run
from trainer.config import budget

RECIPE = "grpo-qwen2.5-vl-72b-mathv60k"


def busy(recipe):
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    return rank_balance.busy_shares(recipe, shape)


def test_two_samples_a_rank_wait_for_the_longest():
    """The original's four updates of 64 samples on 32 ranks against one of 256."""
    ours, original = busy(get(RECIPE)), busy(get(f"{RECIPE}-orig"))
    assert original.typical == pytest.approx(0.84, abs=0.03) and original.heavy < 0.6 and original.worst < 0.5
    assert ours.typical > 0.9 and ours.heavy > 0.85 and ours.worst > 0.75
    assert busy(get("grpo-qwen2.5-vl-3b-mathv60k")) == rank_balance.BusyShares(1.0, 1.0, 1.0), (
        "one rank waits for nobody"
    )


def test_what_is_proposed_does_what_it_says():
    recipe = get(f"{RECIPE}-orig")
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    first, *others = rank_balance.balance_proposals(recipe, shape)
    assert first.change == "algorithm.samples_per_update=0"
    assert rank_balance.busy_shares(override(recipe, [first.change]), shape) == first.busy
    assert all(one.busy.heavy > busy(recipe).heavy for one in (first, *others))
    assert rank_balance.balance_proposals(get(RECIPE), shape) == []


def test_the_plan_says_the_share_and_the_change(capsys):
    code, out, err = run(capsys, "plan", f"{RECIPE}-orig", "--target", "slurm", "--all")
    assert code == 0, err
    said = " ".join(out.split())
    assert "ranks compute 84% of the updates at drawn lengths, 55% where" in said
    assert "--set algorithm.samples_per_update=0: 93% and 89%; one optimizer step per rollout" in said


@pytest.mark.parametrize(
    ("name", "least"),
    [(RECIPE, 10.0), ("grpo-qwen2.5-vl-7b-mathv60k", 16.0)],
)
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
