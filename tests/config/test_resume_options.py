"""What a resumed run may change: what messages tell people to change and what is not computed with."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint.synthetic import again, configure, save, writers
from trainer import config as c
from trainer.config import resume

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
        "rewards.judge_requests=0",
        "rewards.judge_url=http://127.0.0.1:2/v1",
        "optimizer.offload_optimizer=true",
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


def test_an_option_that_the_checkpoint_does_not_name_had_todays_default(monkeypatch):
    """A person who pulls a new version has nothing to set back."""
    config = c.RunConfig()
    older = c.resume_view(config)
    del older["algorithm.dual_clip"]
    assert c.difference(config, older) == ""
    used = c.override(config, ["algorithm.dual_clip=3"])
    assert c.difference(used, older).startswith(
        "algorithm.dual_clip is 3.0, the checkpoint has 0.0: set it back"
    )
    monkeypatch.setitem(resume.MEANT_BEFORE, "algorithm.dual_clip", 3.0)
    assert c.difference(used, older) == ""
    assert c.difference(config, older).startswith("algorithm.dual_clip is 0.0, the checkpoint has 3.0")


def test_options_that_were_renamed_or_removed(monkeypatch):
    config = c.RunConfig()
    older = c.resume_view(config) | {"algorithm.old_clip": 0.0}
    assert "algorithm.old_clip is an option that this version does not know" in c.difference(config, older)
    monkeypatch.setitem(resume.REMOVED, "algorithm.old_clip", (0.0,))
    assert c.difference(config, older) == ""
    assert "resume with the version that wrote it" in c.difference(
        config, older | {"algorithm.old_clip": 1.0}
    )
    monkeypatch.setitem(resume.RENAMED, "algorithm.old_clip", "algorithm.dual_clip")
    del older["algorithm.dual_clip"]
    assert c.difference(config, older | {"algorithm.old_clip": 2.0}).startswith("algorithm.dual_clip is 0.0")


@pytest.mark.parametrize(
    ("option", "unused", "used"), [("algorithm.max_token_age", 0, 2), ("data.curriculum", 0.0, 0.6)]
)
def test_a_run_that_used_an_option_that_is_gone_is_not_resumed_and_any_other_is(option, unused, used):
    older = c.resume_view(c.RunConfig()) | {option: unused}
    assert c.difference(c.RunConfig(), older) == ""
    refused = c.difference(c.RunConfig(), older | {option: used})
    assert refused.startswith(f"{option} is an option that this version does not know")


def test_the_file_of_an_older_run_is_read(tmp_path, monkeypatch):
    """`resume`, `evaluate` and `serve` read the config.yaml that the run was started with."""
    path = tmp_path / "config.yaml"
    monkeypatch.setitem(resume.RENAMED, "algorithm.old_clip", "algorithm.dual_clip")
    monkeypatch.setitem(resume.REMOVED, "rollout.gone", (None, 3))
    text = c.dump(c.RunConfig()).replace("dual_clip: 0.0", "old_clip: 2.0")
    path.write_text(text.replace("rollout:\n", "rollout:\n  gone: 3\n"))
    assert c.load(path).algorithm.dual_clip == 2.0
    path.write_text(text.replace("rollout:\n", "rollout:\n  gone: 4\n"))
    with pytest.raises(c.ConfigError, match="unknown key rollout.gone"):
        c.load(path)


def test_what_an_older_checkpoint_holds_besides_is_not_compared():
    view = c.resume_view(c.RunConfig())
    assert c.difference(c.RunConfig(), view | {"rewards.judge_requests": 5, "run.max_steps": 9}) == ""


def test_where_the_data_lie_is_not_compared(resumed, tmp_path):
    """Another clone, another home: the dataset's fingerprint says that it is the same."""
    assert resumed(f"data.path={tmp_path}/elsewhere") == 2


def test_models_are_compared_by_what_they_hold(tmp_path):
    def model(name: str, weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "transformers_version": name}))
        (folder / "model.safetensors").write_bytes(weights)
        return f"model.path={folder}"

    told: list[str] = []
    config = configure(tmp_path, model("first", b"w" * 200_000))
    save(again(config, told), writers(config, 2), 2)
    copied = c.override(config, [model("copied", b"w" * 200_000)])
    assert again(copied, told).find().step == 2
    trained_on = c.override(config, [model("other", b"w" * 199_999 + b"x")])
    with pytest.raises(c.ConfigError, match="is not the one at .*first that the checkpoint was trained from"):
        again(trained_on, told).find()
    with pytest.raises(c.ConfigError, match="is not the one at"):
        again(c.override(config, ["model.path=Qwen/Qwen2.5-VL-7B-Instruct"]), told).find()
