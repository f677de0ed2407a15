"""Recipes and overrides in files of one's own, named from where the command is given."""

import json
import os
import shutil
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.recipe.recipe_files import expand_paths, flatten
from recipes.records import manifest, run_record
from recipes.records.reproduce import LaunchHalf, check_config
from trainer.config import ConfigError, RunConfig, override
from trainer.system.records import convert_record

ROOT = Path(__file__).parents[2]
BASE = "grpo-qwen2.5-vl-7b-mathv60k"
PYTHON = f"""\
from dataclasses import dataclass, replace
from recipes.presets import get
from beside import STEPS

@dataclass
class Mine:
    steps: int = STEPS

def mine():
    recipe = get("{BASE}")
    run = replace(recipe.config.run, max_steps=Mine().steps, name="mine")
    return replace(recipe, name="mine", config=replace(recipe.config, run=run))

def nothing():
    return 3

def broken():
    raise KeyError("two\\nlines")

VALUE = 1
"""
FILES = {
    "mine.py": PYTHON,
    "beside.py": "STEPS = 17\n",
    "mine.yaml": (
        f"base: {BASE}\ncluster: {{nodes: 2}}\nrollout:\n  max_tokens: 4321\n"
        "optimizer: {learning_rate: 2e-6}\n"
    ),
    "over.yaml": "base: mine.py:mine\nrun: {seed: 5}\n",
    "more.yaml": "rollout: {max_tokens: 99}\nwatch: {on_hang: off}\n",
    "hosts.yaml": "site:\n  hosts: [a, 'b:2201']\n",
    "typo.yaml": "rollout: {max_token: 99}\n",
    "section.yaml": "rollout: 3\n",
    "list.yaml": "- a\n",
    "bad.yaml": "a: [\n",
    "baseless.yaml": "rollout: {max_tokens: 9}\n",
    "circle.yaml": "base: circle.yaml\n",
    "syntax.py": "def mine(:\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder outside the repository with the files of a user; the command leaves the test where it was."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def rendered(capsys, *arguments):
    code, out, err = run(capsys, "render", arguments[0], "--target", "slurm", *arguments[1:])
    assert code == 0, err
    return out


def test_yaml_recipe_and_overrides_are_those_of_the_command_line(capsys, here):
    plain = rendered(
        capsys,
        BASE,
        "--set",
        "cluster.nodes=2",
        "--set",
        "optimizer.learning_rate=2e-6",
        "--set",
        "rollout.max_tokens=4321",
    )
    os.chdir(here)
    assert rendered(capsys, "mine.yaml") == plain and "max_tokens: 4321" in plain
    os.chdir(here)
    over = rendered(capsys, "mine.yaml", "--set", "@more.yaml", "--set", "run.seed=9")
    assert "max_tokens: 99" in over and "seed: 9" in over and "--nodes=2" in over
    assert "on_hang: 'off'" in over
    os.chdir(here)
    hosts = ("--set", "@hosts.yaml", "--target", "ssh", "--bucket", "file:///b", "--dry-run")
    code, out, err = run(capsys, "up", "mine.yaml", *hosts)
    assert code == 0 and "scp -q -P 2201 " in out, err


def test_python_recipe_imports_what_stands_beside_it(capsys, here):
    assert "max_steps: 17" in rendered(capsys, "mine.py:mine")
    os.chdir(here)
    out = rendered(capsys, "over.yaml")
    assert "max_steps: 17" in out and "seed: 5" in out


def test_plan_takes_a_file(capsys):
    code, out, err = run(capsys, "plan", "mine.yaml", "--target", "slurm")
    assert code == 0 and "GiB to spare" in out and "slurm" in out, err


def test_up_records_what_resume_and_reproduce_need(capsys, here, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 7")
    up = ("--target", "slurm", "--detach", "--run-id")
    assert run(capsys, "up", "mine.yaml", *up, "a")[0] == 0
    os.chdir(here)
    assert run(capsys, "up", "mine.py:mine", *up, "b", "--set", "run.seed=4")[0] == 0
    assert run_record.load_record("a").recipe == BASE
    assert run_record.load_record("b").recipe == f"{here}/mine.py:mine"
    (here / "mine.yaml").unlink()
    for name, text in (("a", "max_tokens: 4321"), ("b", "max_steps: 17")):
        code, out, err = run(capsys, "resume", name, "--dry-run")
        assert code == 0 and text in out, err
    launch = json.loads((tmp_path / "runs/b/manifest.json").read_text())["launch"]
    check_config(convert_record(launch, LaunchHalf, "b"), run_record.Path.cwd())
    (here / "beside.py").write_text("STEPS = 1_800\n")  # as long and as old, Python would take its cache
    with pytest.raises(ConfigError, match=r"another configuration than the manifest's: run\.max_steps"):
        check_config(convert_record(launch, LaunchHalf, "b"), run_record.Path.cwd())
    assert run_record.check_run_id(run_record.new_run_id("/a/my_file.py:My_run"))


BAD = [
    (["nothing.yaml"], "nothing.yaml cannot be read: No such file"),
    (["nothing.py:mine"], "write path/to/file.py:function, with a file that exists"),
    (["mine.py"], "write path/to/file.py:function"),
    (["mine.py:other"], "has no function 'other'"),
    (["mine.py:VALUE"], "has no function 'VALUE'"),
    (["mine.py:nothing"], "returned int, and a recipe is recipes.recipe.spec.Recipe"),
    (["mine.py:broken"], r":broken: KeyError: 'two\nlines' (mine.py:"),
    (["syntax.py:mine"], "SyntaxError: invalid syntax (syntax.py, line 1) (syntax.py:1)"),
    (["baseless.yaml"], "base is missing"),
    (["circle.yaml"], "its base leads back to it"),
    ([BASE, "--set", "@nothing.yaml"], "nothing.yaml cannot be read"),
    ([BASE, "--set", "@typo.yaml"], "did you mean rollout.max_tokens?"),
    ([BASE, "--set", "@section.yaml"], "rollout"),
    ([BASE, "--set", "@list.yaml"], "write a mapping of sections"),
    ([BASE, "--set", "@bad.yaml"], "bad.yaml is not YAML"),
]


@pytest.mark.parametrize("command", ["plan", "render", "up"])
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_files_are_one_line(command, arguments, message, capsys, tmp_path):
    code, out, err = run(capsys, command, *arguments, "--target", "slurm")
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "runs").exists()


def test_runs_that_cannot_be_written_are_one_line(capsys, monkeypatch):
    for module in (run_record, manifest):
        monkeypatch.setattr(module, "RUNS", Path("/sys/kernel/runs"))
    code, _, err = run(capsys, "up", "demo", "--target", "local", "--detach")
    assert code == 2 and err.count("\n") == 1 and "/sys/kernel/runs: Operation not permitted: name" in err


def test_code_is_looked_for_where_the_command_is_given(capsys, here):
    shutil.copy(ROOT / "examples/reward.py", here / "own_reward.py")
    words = "up", "demo", "--target", "local", "--dry-run", "--set"
    code, _, err = run(capsys, *words, "rewards.function=own_reward.py:reward")
    assert code == 0, err
    os.chdir(here)
    code, _, err = run(capsys, *words, "rewards.function=nope.py:reward")
    assert code == 2 and f"a file that exists (looked in {here} and {ROOT})" in err
    os.chdir(ROOT / "examples")
    assert expand_paths("demo", ["turns.environment=environment.py:Ruler"])[1] == [
        "turns.environment=examples/environment.py:Ruler"
    ]


LISTED = "[{path: own_reward.py:reward, weight: 2}, {path: examples/reward.py:reward, name: theirs}]"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([BASE, "--set", f"rewards.functions={LISTED}"], ""),
        ([BASE, "--set", "@given.yaml"], f"rewards: {{functions: {LISTED}}}"),
        (["given.yaml"], f"base: {BASE}\nrewards: {{functions: {LISTED}}}"),
        ([BASE, "--set", "@given.yaml"], "rewards: {function: own_reward.py:reward}"),
    ],
)
def test_code_that_a_list_or_a_file_names_is_looked_for_there_too(capsys, here, given, text):
    shutil.copy(ROOT / "examples/reward.py", here / "own_reward.py")
    (here / "given.yaml").write_text(text)
    _, assignments = expand_paths(given[0], given[2:])
    paths = [function.path for function in override(RunConfig(), assignments).rewards.own]
    assert (
        paths
        == [f"{here}/own_reward.py:reward", "examples/reward.py:reward"][: 1 if "function:" in text else 2]
    )
    (here / "own_reward.py").write_text("def reward(:\n")
    code, _, err = run(capsys, "up", *given, "--target", "local", "--dry-run")
    assert code == 2 and "SyntaxError: invalid syntax" in err and "(own_reward.py:1)" in err


def test_folders_and_texts_that_a_file_names_are_looked_for_there_too(here):
    (here / "model").mkdir()
    (here / "prompt.txt").write_text("Be brief: think.")
    (here / "given.yaml").write_text('model: {path: model}\ndata: {system_prompt: "@prompt.txt"}')
    config = override(RunConfig(), expand_paths(BASE, ["@given.yaml"])[1])
    assert (config.model.path, config.data.system_prompt) == (f"{here}/model", "Be brief: think.")


def test_a_recipe_of_a_file_finds_no_token_and_ends_no_command(capsys, here, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("MY_SITE", "here")
    code = 'import os\ndef mine():\n    print(os.environ["MY_SITE"])\n    os.environ["MY_TOKEN"]\n'
    (here / "tokens.py").write_text(code)
    (here / "ends.py").write_text("import os\ndef mine():\n    os._exit(0)\n")
    code, _, err = run(capsys, "plan", "tokens.py:mine", "--target", "slurm")
    assert code == 2 and "KeyError: 'MY_TOKEN' (tokens.py:4)" in err
    os.chdir(here)
    code, _, err = run(capsys, "plan", "ends.py:mine", "--target", "slurm")
    assert code == 2 and "recipe: no process started in 3 attempts" in err


def test_flattened_values_keep_their_types():
    values = {"a": {"b": [1, "x"], "c": None}, "d": "1e-6", "e": True}
    assert flatten(values) == ['a.b=[1, "x"]', "a.c=null", 'd="1e-6"', "e=true"]
    assert expand_paths("demo", ["a=1"]) == ("demo", ["a=1"])
