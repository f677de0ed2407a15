"""What the desk says of buckets that it cannot open itself, before anything is rented."""

import json

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import bucket_access

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
ROWS = ("--set", "data.path=gs://mine/rows", "--bucket", "s3://mine")


@pytest.fixture(autouse=True)
def amazons_keys(elsewhere, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stand-in")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stand-in")


@pytest.mark.parametrize(
    "target", ["skypilot", "skypilot-runpod", "skypilot-aws", "skypilot-kubernetes", "slurm"]
)
@pytest.mark.parametrize("given", [("--bucket", "gs://mine"), ROWS])
def test_google_storage_without_a_key_is_refused_where_machines_have_no_account(target, given, capsys):
    up = ["up", SEVEN, "--target", target, *given]
    code, out, err = run(capsys, *up)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "no credentials for gs://mine" in err and "export GOOGLE_SERVICE_ACCOUNT_KEY" in err
    assert f"machines of {target} have no Google account" in err
    code, out, _ = run(capsys, *up, "--dry-run")
    assert code == 0 and f"# --- `up` itself would stop: {err.removeprefix('launch.py: ')}" in out


@pytest.mark.parametrize("given", [("--bucket", "gs://mine/runs"), ROWS])
def test_google_storage_without_a_key_is_said_to_be_unverified_on_google_cloud(
    given, capsys, monkeypatch, tmp_path
):
    up = ["up", SEVEN, "--target", "skypilot-gcp", "--run-id", "mine", *given]
    code, out, _ = run(capsys, *up, "--dry-run")
    said = [line for line in out.splitlines() if "NOT VERIFIED: gs://mine/" in line]
    assert code == 0 and len(said) == 1 and "gcloud storage ls gs://mine" in said[0]
    stand_in(tmp_path, monkeypatch, "sky", "")
    # the other bucket is Amazon's
    monkeypatch.setattr(bucket_access, "_storage", lambda command, url, env: "")
    monkeypatch.setattr("recipes.drivers.launch_checks.earlier_launch", lambda *a: None)
    code, out, _ = run(capsys, *up, "--detach")
    assert code == 0 and out.count("NOT VERIFIED: gs://mine/") == 1
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{}")
    code, out, _ = run(capsys, *up, "--dry-run")
    assert code == 0 and "NOT VERIFIED" not in out


def test_a_bucket_that_only_the_weights_or_rows_are_in_needs_its_key_too(capsys, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    serve = ["serve", "Qwen/Qwen2.5-VL-7B-Instruct", "--target", "skypilot-runpod"]
    serve += ["--set", "storage.weights=s3://mine/hf"]
    said = "no credentials for s3://mine/hf: export AWS_ACCESS_KEY_ID"
    code, out, err = run(capsys, *serve)
    assert code == 2 and out == "" and said in err
    code, out, _ = run(capsys, *serve, "--dry-run")
    assert code == 0 and f"# --- `up` itself would stop: {said}" in out


def test_rows_in_a_bucket_are_counted_before_anything_is_rented(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    rows = tmp_path / "rows"
    given = ("--set", f"data.path={rows.as_uri()}")

    def up(run_id):
        return run(capsys, "up", SEVEN, "--target", "slurm", "--detach", "--run-id", run_id, *given)

    code, _, err = up("none")
    assert code == 2 and err.count("\n") == 1 and f"{rows}" in err and "manifest.json" in err
    rows.mkdir(exist_ok=True)
    for split, count, said in (
        ("train", 30, "rows has 30 rows and a step takes 64: lower rollout.prompts_per_step"),
        ("test", 6400, "has no split train: set data.split"),
    ):
        (rows / "manifest.json").write_text(json.dumps({"rows": {split: count}}))
        code, _, err = up(split)
        assert code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "calls").exists(), "nothing was submitted"
    (rows / "manifest.json").write_text(json.dumps({"rows": {"train": 6400}}))
    code, _, err = up("enough")
    assert code == 0, err
