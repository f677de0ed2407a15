"""A task is given the tokens that it uses."""

import json
import os
import subprocess

import pytest
import yaml
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.platforms import pbs, script
from recipes.platforms.pbs import TAKE_TOKENS
from recipes.presets import resolve
from tests.recipes.rendered import render
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.storage.storage import Storage

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
    assert "secrets" not in task, "an empty one overrides `--env NAME=value`; `--secret NAME` adds it"
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


def test_a_job_of_pbs_gets_its_tokens_from_a_file_and_whole(capsys, monkeypatch, tmp_path):
    """`qstat -f` shows what `-v` names, cut at its commas."""
    key = json.dumps({"type": "service_account", "private_key": '-----BEGIN it\'s $HOME, "x"\n', "a": [1, 2]})
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key)
    monkeypatch.setattr("recipes.drivers.bucket_access.probe_bucket", lambda *a: None)
    monkeypatch.setattr("recipes.drivers.shared_record.publish_manifest", lambda *a: None)
    monkeypatch.setattr("recipes.drivers.launch_checks.earlier_launch", lambda *a: None)
    stand_in(tmp_path, monkeypatch, "qsub", "echo 7.server")
    given = ("up", SEVEN, "--target", "pbs", "--bucket", "gs://mine", "--run-id", "mine", "--detach")
    code, out, err = run(capsys, *given)
    assert code == 0, err
    call = (tmp_path / "calls").read_text()
    assert "GOOGLE" not in call and "service_account" not in call and "SPOTRL_TOKENS_FILE=" in call
    path = pbs.tokens_file("mine")
    assert path.stat().st_mode & 0o777 == 0o600
    take = f'{TAKE_TOKENS}python3 -c \'import os; print(os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"], end="")\''
    env = {"PATH": os.environ["PATH"], "SPOTRL_TOKENS_FILE": str(path)}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", take], env=env, capture_output=True, text=True)
    assert done.stdout == key, done.stderr
    gone = env | {"SPOTRL_TOKENS_FILE": str(tmp_path / "gone")}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", take], env=gone, capture_output=True, text=True)
    assert done.returncode == 2 and "is not readable here" in done.stderr


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("/home/me/key.json", 'export GOOGLE_SERVICE_ACCOUNT_KEY="$(cat /home/me/key.json)"'),
        ("~/key.json", "GOOGLE_APPLICATION_CREDENTIALS=~/key.json"),
        ("key.json", "to the path key.json"),
        ('{"type": "service_acc', "is not the JSON of a key"),
        ("s3cret-not-to-show", "is not the JSON of a key"),
        ('["a"]', "is not the JSON of a key"),
    ],
)
def test_a_google_key_that_is_none_says_what_to_do(capsys, monkeypatch, value, says):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", value)
    up = ("up", SEVEN, "--target", "skypilot-gcp", "--bucket", "gs://mine", "--run-id", "mine", "--dry-run")
    code, _, err = run(capsys, *up)
    assert code == 2 and err.count("\n") == 1 and says in err and "s3cret" not in err
    with pytest.raises(ConfigError, match="the Google key cannot be read"):
        Storage("gs://mine/x", env={"GOOGLE_SERVICE_ACCOUNT_KEY": value})


@pytest.mark.parametrize("run_id", ["..", ".", "a/b", "../other", "", "/", ".hidden", "a\nb", "a b"])
def test_a_run_id_that_leads_elsewhere_is_refused(capsys, run_id):
    with pytest.raises(ConfigError, match="names no folder of a bucket"):
        RunStore.in_bucket("s3://mine/runs", run_id)
    for command in (("status", run_id), ("down", run_id), ("resume", run_id), ("pull", run_id)):
        if run_id:
            code, out, err = run(capsys, *command, "--bucket", "s3://mine/runs")
            assert code == 2 and err.count("\n") >= 1 and "Traceback" not in err


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
