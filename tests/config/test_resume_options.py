"""What a resumed run may change: what messages tell people to change and what is not computed with."""

from __future__ import annotations

import pytest

from tests.checkpoint.synthetic import again, configure, save, writers
from trainer import config as c

JUDGED = ("rewards.judge_url=http://127.0.0.1:1/v1", "rewards.judge_model=m", "rewards.judge_requests=3")


@pytest.fixture
def resumed(tmp_path):
    """`resumed(*changes)`: the step that a judged run with these changes resumes from."""
    config, told = configure(tmp_path, *JUDGED), list[str]()
    save(again(config, told), writers(config, 2), 2)

    def step(*changes: str) -> int | None:
        found = again(c.override(config, list(changes)), told).find()
        return found and found.step

    return step


@pytest.mark.parametrize(
    "change",
    [
        "rewards.judge_requests=9",
        "rewards.judge_requests=0",
        "rewards.judge_timeout_s=60",
        "rewards.judge_url=http://127.0.0.1:2/v1",
        "rewards.max_timeout_rate=0.5",
        "rewards.deadline_s=20",
        "rewards.workers=1",
        "rollout.gpu_memory_utilization=0.3",
        "rollout.tensor_parallel=2",
        "rollout.kv_cache_gib=2",
        "data.image_cache_gib=0.1",
        "optimizer.max_skipped_updates=9",
        "optimizer.offload_optimizer=true",
        "algorithm.micro_batch_tokens=400",
        "model.gradient_checkpointing=false",
        "checkpoint.keep_last=1",
        "checkpoint.max_disk_gib=9",
        "checkpoint.max_restarts=9",
        "guards.end=",
        "watch.start_s=1800",
        "placement.workers_per_node=2",
        "logging.profile_step=5",
    ],
)
def test_what_messages_say_to_change_does_not_stop_a_resume(resumed, change):
    assert resumed(change) == 2


@pytest.mark.parametrize(
    "change", ["rewards.judge_model=other", "rewards.judge_types=math", "rewards.judge_url="]
)
def test_another_judge_or_none_would_change_what_a_reward_means(resumed, change):
    with pytest.raises(c.ConfigError, match=change.partition("=")[0]):
        resumed(change)


def test_what_an_older_checkpoint_holds_besides_is_not_compared():
    view = c.resume_view(c.RunConfig())
    assert c.compared(view | {"rewards.judge_requests": 5, "run.max_steps": 9}) == view
