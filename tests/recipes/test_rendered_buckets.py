"""Rendered files launched by hand: which tokens their heads ask for, and what they refuse as a bucket."""

import os
import re
import subprocess

import pytest
import yaml

from recipes.drivers.launching import with_head
from recipes.presets import get
from recipes.recipe.spec import override
from tests.recipes.rendered import main_file, make_checkout, render


@pytest.mark.parametrize(
    ("target", "overrides", "said", "unsaid"),
    [
        ("skypilot-gcp", ["storage.bucket=gs://mine"], [], ["--secret"]),
        ("skypilot-runpod", ["storage.bucket=gs://mine"], ["--secret GOOGLE_SERVICE_ACCOUNT_KEY"], ["AWS_"]),
        ("skypilot-runpod", ["storage.bucket=r2://mine"], ["--secret R2_ACCESS_KEY_ID"], ["AWS_"]),
        ("skypilot-runpod", [], ["--secret AWS_ACCESS_KEY_ID", "resumes from its last"], ["R2_"]),
        (
            "skypilot-runpod",
            ["evaluation.pass_rate_samples=4"],
            ["goes on behind the rows"],
            ["resumes from"],
        ),
    ],
)
def test_the_head_says_what_the_file_needs(target, overrides, said, unsaid):
    text = main_file("grpo-qwen2.5-vl-7b-mathv60k", target, *overrides)
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert all(part in head for part in said) and not any(part in head for part in unsaid), head


WORKS = ("local", "ssh", "slurm", "pbs", "skypilot", "skypilot-runpod", "skypilot-gcp", "skypilot-kubernetes",
         "dstack-runpod", "dstack-gcp", "dstack-ssh")  # fmt: skip


def beginning(target, *overrides):
    """The shell that a rendered file begins with, up to where it has made its folders."""
    hosts = ["site.hosts=[a]"] if target in ("ssh", "dstack-ssh") else []
    text = main_file("grpo-qwen2.5-vl-7b-mathv60k", target, *hosts, *overrides)
    if target.startswith("skypilot"):
        text = yaml.safe_load(text)["setup"]
    if target.startswith("dstack"):
        text = re.search(r"set -euo pipefail\n.*", yaml.safe_load(text)["commands"][0], re.S)[0]
    found = re.search(r"^\. trainer/shell/task\.sh begin .*\n", text, re.M)
    assert found
    return f"{text[: found.end()]}echo began $BUCKET\n"


@pytest.mark.parametrize("target", WORKS)
def test_no_rendered_file_begins_without_a_bucket_that_can_be_one(target, tmp_path):
    """Committed files are launched by hand, so what the desk refuses must be refused where they run."""
    make_checkout(tmp_path, "")
    here = str(tmp_path)
    batch = {"SLURM_SUBMIT_DIR": here, "SLURM_JOB_ID": "1", "PBS_O_WORKDIR": here, "PBS_JOBID": "1"}

    def begin(bucket, *overrides):
        env = batch | {"PATH": os.environ["PATH"], "HOME": here, "WORK": f"{here}/work"}
        env |= {"RUN_ID": "r", "BUCKET": bucket}
        shell = ["bash", "-c", beginning(target, *overrides)]
        return subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True)

    names = ("s3://", "gs://", "r2://", "s3://$MINE", "s3:///runs", " s3://mine", "file://data", "s3://...")
    for wrong in names:
        done = begin(wrong)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"error: BUCKET is '{wrong}': write s3://NAME/PREFIX")
        assert not (tmp_path / "work").exists()
    rented = target.startswith(("skypilot", "dstack"))
    assert begin("file:///workspace/runs").returncode == (2 if rented else 0)
    assert begin("s3://mine/").stdout.endswith("began s3://mine\n")
    named = "storage.bucket=s3://mine/runs/"
    assert begin("", named).stdout.endswith("began s3://mine/runs\n")
    assert begin("s3://mine/runs/", named).returncode == 0
    other = begin("s3://other", named)
    assert other.returncode == 2 and "written for the bucket s3://mine/runs" in other.stderr
    if target == "skypilot-runpod":
        volume = ["storage.volume=mine", "site.region=US/US-KS-2"]
        assert begin("file:///workspace/runs", *volume).returncode == 0
        assert begin("file:///data", *volume).returncode == 2


@pytest.mark.parametrize("target", ["skypilot-runpod", "dstack-runpod", "slurm", "pbs"])
def test_the_head_of_a_file_that_up_wrote_launches_that_file(target, tmp_path):
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["storage.bucket=s3://mine"])
    rendered = render(recipe, target)
    for text in rendered.values():
        own = with_head(text, recipe, target, "mine")
        head = [line for line in own.splitlines() if line.startswith("# ")]
        assert not any("recipes/generated" in line or "my-run" in line for line in head)
        assert [line for line in own.splitlines() if not line.startswith("#")] == [
            line for line in text.splitlines() if not line.startswith("#")
        ]
    main = with_head(next(iter(rendered.values())), recipe, target, "mine")
    assert f"runs/mine/task/{next(iter(rendered))}" in main and "RUN_ID=mine" in main
