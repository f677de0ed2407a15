"""Steps that are sampled ahead, of a mixture of experts: what the choices of older weights are good for."""

from __future__ import annotations

import pytest

from tests.loops.jobs import REWARD, Job
from trainer.config import override


@pytest.mark.long
def test_replay_brings_older_weights_nearer_to_the_policy(small_config, family_model, tmp_path):
    """Two runs of two steps, one step ahead, which differ in the replay alone. In fp32 the first update is
    the same in both, since engine and policy choose alike. So in step 2 both have the same completions and
    the same two sets of weights, and some tokens whose experts are others by now."""
    (tmp_path / "reward.py").write_text(REWARD)
    found = {}
    for replays in (True, False):
        folder = tmp_path / f"replay-{replays}"
        options = [
            f"run.dir={folder / 'run'}",
            "run.max_steps=2",
            f"rewards.function={tmp_path / 'reward.py'}:reward",
            "rewards.workers=1",
            "placement.workers_per_node=1",
            f"model.path={family_model('qwen3_vl_moe')}",
            f"algorithm.routing_replay={replays}",
            "rollout.staleness=1",
            "rollout.prompts_per_step=16",
            "optimizer.learning_rate=1e-4",
        ]
        job = Job(override(small_config, options), folder).start()
        assert job.wait(600) == 0, job.tail()
        first, second = job.metrics()[-2:]
        assert first["staleness/kl"] < 1e-9
        print({name: value for name, value in second.items() if name.startswith("staleness/")})
        found[replays] = second
    assert found[True]["staleness/rerouted_fraction"] > 0.01
    assert found[True]["staleness/kl"] < found[False]["staleness/kl"] / 2
    assert found[True]["staleness/ess"] > found[False]["staleness/ess"]
