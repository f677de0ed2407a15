"""What the command line refuses: one line each, and nothing is started."""

import shlex
import subprocess
from dataclasses import replace

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import launch_checks, launching
from recipes.presets import get
from recipes.recipe.spec import override, validate
from trainer.config import ConfigError

SEVEN, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
BAD = [
    ("up grpo-qwen2.5-vl-7b-mathv60", "did you mean grpo-qwen2.5-vl-7b-mathv60k?"),
    ("up grpo-qwen2.5-vl-7b", "it is the beginning of grpo-qwen2.5-vl-7b-mathv60k, grpo-"),
    ("up 7B --target skypilot-oci", "unknown target skypilot-oci"),
    ("up 7B --set cluster.gpu=H1000", "unknown GPU H1000: did you mean H100?"),
    ("up 72B --target slurm --set cluster.nodes=1", "cheapest change: --set"),
    ("up 72B --target slurm --set cluster.spot=only", "use skypilot-gcp"),
    ("up 72B --target skypilot-runpod", "use dstack-runpod"),
    ("up 7B --target skypilot-gcp", "give --bucket s3://"),
    ("up 7B --target skypilot-runpod --bucket s3://mine", "export AWS_ACCESS_KEY_ID"),
    ("up 7B --target skypilot-runpod --bucket gs://mine", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    ("up 7B --target skypilot-runpod --bucket r2://mine", "export R2_ACCOUNT_ID"),
    ("up 7B --target slurm --bucket ftp://b", "write it as s3://NAME/PREFIX"),
    ("up 7B --target skypilot-runpod --bucket s3://", "names no bucket"),
    ("up 7B --target slurm --bucket ''", "that variable is not set"),
    ("up 7B --target slurm --bucket '  ' --dry-run", "variable is not set"),
    ("up 7B --target slurm --set storage.bucket=s3:/a", "unknown form"),
    ("pull mine --bucket 's3://$MINE'", "holds a variable that was not filled in"),
    ("up 7B --target skypilot-runpod --bucket file:///data", "a folder of one machine, and skypilot-runpod"),
    (
        "render 7B --target dstack-gcp --set storage.bucket=file:///data",
        "a folder of one machine, and dstack",
    ),
    ("up 7B --target slurm --set logging.wandb=online", "export WANDB_API_KEY"),
    (
        "up 7B --target skypilot-gcp --set budget.max_hourly_usd=10",
        "costs 16.22 per hour (8 x A100-80GB, spot)",
    ),
    ("up 72B --hosts a,b", "wants 4 machines and 2 were given"),
    ("up 72B --hosts a,b,c,c", "names a machine twice"),
    ("up 72B --hosts a,b,c,d:x", "write it as"),
    ("up demo --set rollout.max_token=1", "did you mean rollout.max_tokens?"),
    ("up demo --set run.id=x", "give it as --run-id"),
    ("up demo --set rollout", "write it as section.key=value"),
    ("up demo --run-id Bad/Id", "lower-case letters"),
    ("render sft-qwen2.5-vl-7b-full --target skypilot-runpod", "trains on rows that nobody publishes"),
    ("plan demo --budget 0", "--budget 0: give dollars above 0"),
    ("plan demo --budget nan", "--budget nan: give dollars above 0"),
    ("plan demo --network-gbit 0", "--network-gbit 0: give Gb/s above 0"),
    ("plan demo --deadline 0h", "give more than no time"),
    ("plan 7B --set cluster.gpus_per_node=0", "is made for GPUs: give 1 or more"),
    ("plan 7B --set model.path=/nowhere", "has no config.json on this machine"),
    ("up demo --set model.path=/nowhere", "model.path /nowhere has no config.json on this machine"),
    ("up demo-sft-lora --target slurm", "is not made for slurm: it runs on this machine, --target local"),
    ("resume nothing", "no run nothing was launched from here"),
    ("report nothing", "no run at nothing"),
    ("reproduce nothing.json", "/nothing.json"),
    ("reproduce docs", "/docs/manifest.json"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_starts_nothing(line, message, capsys, monkeypatch, tmp_path):
    arguments = [{"7B": SEVEN, "72B": BIG}.get(word, word) for word in shlex.split(line)]
    started = []
    monkeypatch.setattr(launching, "_run", lambda *a: started.append(a))
    if arguments[0] == "report":
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0))
    code, out, err = run(capsys, *arguments)
    assert code == 2 and err.startswith("launch.py: ") and err.count("\n") == 1 and message in err
    assert started == [] and out == "" and not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    "option",
    ["site.account", "site.partition", "site.qos", "site.reservation", "site.gres", "site.shared_dir",
     "site.namespace", "site.node_pool", "cluster.image", "storage.volume"],
)  # fmt: skip
@pytest.mark.parametrize(
    "text", ["x\ntouch ran", "$(touch ran)", "`touch ran`", "x; touch ran", "--account=x", 'x"y']
)
def test_a_text_of_a_recipe_is_one_word_of_its_task_file(option, text):
    recipe = get(SEVEN)
    section, _, name = option.partition(".")
    recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{name: text})})
    with pytest.raises(ConfigError, match=f"{option} is .* more than one word"):
        validate(recipe)


def test_what_is_no_yaml_is_named(capsys):
    code, _, err = run(capsys, "plan", "demo", "--set", "site.account=`x`")
    assert code == 2 and "cannot be read as YAML: put it in quotes" in err


def test_paths_may_have_blanks_and_variables():
    options = ["site.shared_dir=/scratch/my lab/${USER}/$PROJECT", "site.gres=gpu:h100:8"]
    validate(override(get(SEVEN), [*options, "site.constraint='[a100|h100]&ib'"]))


def test_a_checkout_below_a_blank_is_refused_before_anything_starts(capsys, monkeypatch, tmp_path):
    (tmp_path / "my work").mkdir()
    monkeypatch.setattr(launch_checks.Path, "cwd", lambda: tmp_path / "my work")
    code, _, err = run(capsys, "demo", "--dry-run")
    assert code == 2 and "below a path with a blank: move it" in err and err.count("\n") == 1


def test_reproducible_wants_a_git_checkout(capsys, monkeypatch):
    monkeypatch.setattr(launch_checks.manifest, "run_git", lambda *words, **_: "")  # as where there is none
    code, _, err = run(capsys, "demo", "--reproducible", "--dry-run")
    assert code == 2 and "this folder is no git checkout: clone one" in err and err.count("\n") == 1
