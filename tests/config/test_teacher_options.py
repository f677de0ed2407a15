"""What a run with a teacher may and may not ask, and what a resumed one must share."""

import pytest

from trainer import config as c

BASE = ["algorithm.teacher=some/teacher", "algorithm.kl_coef=0"]


def test_rewards_and_groups_are_not_needed():
    options = ["rollout.samples_per_prompt=1", "rewards.accuracy_weight=0", "rewards.format_weight=0"]
    config = c.override(c.RunConfig(), [*BASE, *options])
    c.validate(config)
    assert config.teaches and config.old_logprobs
    with pytest.raises(c.ConfigError, match="use at least 2"):
        c.validate(c.override(config, ["algorithm.teacher=", "rewards.accuracy_weight=1"]))


def test_the_teacher_is_the_model_of_its_own_configuration():
    options = ["algorithm.teacher_revision=1234", "lora.rank=8", "model.path=some/student"]
    config = c.override(c.RunConfig(), [*BASE, *options])
    own, teacher = c.by_model(config)
    assert own is config and not teacher.teaches
    assert (teacher.model.path, teacher.model.revision, teacher.lora.rank) == ("some/teacher", "1234", 0)
    assert c.by_model(c.RunConfig()) == [c.RunConfig()]


def test_a_resumed_run_keeps_its_teacher_wherever_it_lies():
    config = c.override(c.RunConfig(), BASE)
    recorded = c.resume_view(config)
    assert not c.difference(c.override(config, ["algorithm.teacher=/elsewhere"]), recorded), (
        "compared by what it holds"
    )
    assert "algorithm.teacher is ''" in c.difference(c.override(config, ["algorithm.teacher="]), recorded)
    assert "algorithm.teacher_coef" in c.difference(
        c.override(config, ["algorithm.teacher_coef=2"]), recorded
    )
