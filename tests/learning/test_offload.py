"""Moving ZeRO-3's states out of the engine's way changes nothing; and what DeepSpeed does to a process is
undone."""

from dataclasses import replace


def test_moving_states_away_and_back_changes_nothing(run_ranks, small_config):
    config = replace(
        small_config,
        model=replace(small_config.model, dtype="bf16"),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    result = run_ranks("moving", config)[0]
    assert result["moved"] == result["kept"]
    assert any(
        abs(total) > 0 for name, (total, _) in result["kept"]["shards"].items() if name.endswith("/exp_avg")
    )
    assert len(result["rotary"]) == 2 and all(result["rotary"])  # zero.Init would round them to bf16
    assert result["linear"]  # vLLM compiles calls of it in the same process
