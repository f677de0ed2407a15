"""A task is given the tokens that it uses."""

import pytest
import yaml
from desk import elsewhere as elsewhere
from desk import run

from recipes.presets import resolve
from recipes.targets import script
from recipes.targets.render import render

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["storage.bucket=s3://mine"], ("HF_TOKEN", *AWS)),
        (["storage.bucket=gs://mine"], ("HF_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY")),
        (["storage.bucket=r2://mine", "data.path=s3://rows/a"],
         ("HF_TOKEN", *AWS, "R2_ACCESS_KEY_ID", "R2_SECRET_ACCESS_KEY")),
        (["storage.bucket=gs://mine", "logging.wandb=online", "rewards.judge_url=https://judge/v1",
          "rewards.judge_model=j"],
         ("HF_TOKEN", "WANDB_API_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "SPOTRL_JUDGE_KEY")),
        (["storage.bucket=gs://mine", "rewards.remote_url=https://grader/get_reward"],
         ("HF_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY", "SPOTRL_REWARD_TOKEN")),
    ],
)  # fmt: skip
def test_a_task_names_what_its_recipe_uses(overrides, names):
    recipe = resolve(SEVEN, overrides)
    assert script.secret_names(recipe) == names
    task = yaml.safe_load(next(iter(render(recipe, "skypilot-gcp").values())))
    assert tuple(task["secrets"]) == names
    for unused in set(script.SECRETS) - set(names):
        assert unused not in task["run"] + task["setup"]


def test_where_the_bucket_is_asked_for_any_of_its_keys_may_be_given():
    names = script.secret_names(resolve(SEVEN, []))
    assert {*AWS, "R2_ACCESS_KEY_ID", "GOOGLE_SERVICE_ACCOUNT_KEY"} < set(names)
    assert not {"WANDB_API_KEY", "SPOTRL_REWARD_TOKEN", "SPOTRL_JUDGE_KEY"} & set(names)
    assert script.secret_names(resolve("preflight", [])) == ("HF_TOKEN",)
    assert script.secret_names(resolve("serve", [])) == ("HF_TOKEN", script.API_KEY)


def test_up_hands_over_no_token_that_the_run_does_not_use(capsys, monkeypatch):
    for name in (*AWS, "GOOGLE_SERVICE_ACCOUNT_KEY", "WANDB_API_KEY", "SPOTRL_JUDGE_KEY"):
        monkeypatch.setenv(name, "{}")
    given = ["up", SEVEN, "--target", "skypilot-runpod", "--bucket", "s3://mine", "--dry-run"]
    code, out, err = run(capsys, *given)
    assert code == 0, err
    command = out.splitlines()[-1]
    assert all(f"--secret {name}" in command for name in AWS)
    assert not any(name in command for name in ("GOOGLE", "WANDB", "JUDGE"))


def test_a_dry_run_needs_no_key_and_says_where_up_would_stop(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    given = ["up", SEVEN, "--target", "skypilot-runpod", "--bucket", "s3://mine"]
    code, out, err = run(capsys, *given, "--dry-run")
    assert code == 0, err
    assert "# --- `up` itself would stop: no credentials for s3://mine" in out and "resources:" in out
    assert run(capsys, *given)[0] == 2
    online = [*given, "--set", "logging.wandb=online", "--set", "checkpoint.every_steps=9", "--dry-run"]
    assert run(capsys, *online)[0] == 0
