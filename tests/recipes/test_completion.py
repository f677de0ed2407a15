"""Shell completion, by the shells themselves, and `--help` on one screen."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.commands.command_line import PANELS, run_ids
from recipes.commands.main_commands import launch
from recipes.records.run_record import RunRecord

ROOT = Path(__file__).parents[2]
BASH = """
source <(_SPOTRL_COMPLETE=bash_source {python} {program})
cd {here}
COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
$(complete -p spotrl | sed 's/.* -F \\([^ ]*\\) .*/\\1/') {program}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("re", ["render", "resume", "report", "reproduce"]),
        ("plan grpo-qwen2.5-vl-72b-mathv60k-", ["grpo-qwen2.5-vl-72b-mathv60k-orig"]),
        ("up demo --dry", ["--dry-run"]),
    ],
)
def test_bash_completes(line, wanted):
    """In the checkout, with the script that Click writes."""
    script = BASH.format(
        python=sys.executable, program=ROOT / "launch.py", here=ROOT, line=f"launch.py {line}"
    )
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(wanted)


def test_an_installation_has_the_command():
    """pyproject.toml names the function that `spotrl` calls."""
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "spotrl"
    ].partition(":")
    call = f"import sys; sys.argv[1:] = ['plan', 'demo']; from {module} import {function} as call; call()"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "\ndemo: " in done.stdout


def test_runs_are_completed_newest_first(tmp_path):
    for started, name in enumerate(("mine-1", "mine-2")):
        RunRecord(run_id=name, recipe="demo", target="local", started_s=float(started)).save()
    assert list(run_ids()) == ["mine-2", "mine-1"]
    (argument,) = [one for one in launch.commands["logs"].params if one.name == "run"]
    context = launch.commands["logs"].make_context("logs", [], resilient_parsing=True)
    assert [item.value for item in argument.shell_complete(context, "mine")] == ["mine-2", "mine-1"]


def lines(capsys, *arguments):
    code, said, _ = run(capsys, *arguments)
    assert code == 0 and "\x1b" not in said
    return said.splitlines()


def test_help_fits_a_screen_in_panels(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = lines(capsys, "-h")
    assert len(said) < 40 and all(len(line) <= 80 for line in said if not line.startswith("python3"))
    assert said == lines(capsys, "--help")
    titles = [line.rstrip(" ─") for line in said if line.endswith("──")]
    assert titles == [*PANELS, "examples"]
    assert {line.split()[0] for line in said} >= set(launch.commands)
    assert not any(line.endswith("...") for line in said[2:]), "a summary is cut off"


@pytest.mark.parametrize("name", [name for name in launch.commands if name not in ("data", "test")])
def test_help_of_a_command_fits_a_screen(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = lines(capsys, name, "--help")
    assert len(said) < 40
    options = [
        option for one in launch.commands[name].params for option in one.opts if option.startswith("--")
    ]
    assert all(any(line.startswith(option) for line in said) for option in options)


def test_no_arguments_show_the_commands_and_are_refused(capsys):
    code, out, err = run(capsys)
    assert code == 2 and not out and "preflight" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["upp", "demo"], "unknown command upp: did you mean up?"),
        (["zzz"], "unknown command zzz: see `python3 launch.py --help`"),
        (["up"], "missing argument 'RECIPE'; see `python3 launch.py up --help`"),
        (["up", "demo", "more"], "extra argument (more)"),
        (["up", "demo", "--tarrget", "slurm"], "--target"),
        (["logs", "mine", "--worker", "a"], "'a' is not a valid integer"),
        (["demo", "--method", "ppo"], "'ppo' is not one of 'grpo', 'sft-lora'"),
        (["evaluate", "demo"], "give one of --benchmarks and --pass-rate"),
        (["evaluate", "demo", "--pass-rate", "--benchmarks", "math-500"], "give one of --benchmarks"),
        (["publish", "mine"], "missing option '--to'"),
        (["compare", "mine"], "compare one run with --expected, or two runs"),
        (["compare", "mine", "other", "--expected"], "compare one run with --expected, or two runs"),
        (["status", "mine", "--", "--all"], "`status` starts no platform that --all could be passed on to"),
        (["plan", "demo", "--deadline", "0h"], "--deadline '0h': give more than no time"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_wrong_command_is_one_line(given, message, capsys, monkeypatch):
    from recipes.drivers import launch_checks

    monkeypatch.setattr(launch_checks.manifest, "dirty_files", lambda: ["a.py"])
    code, out, err = run(capsys, *given)
    assert code == 2 and not out and err.startswith("launch.py: ") and err.count("\n") == 1 and message in err


def test_what_stands_behind_two_dashes_goes_to_the_platform_as_it_is(monkeypatch):
    from recipes.drivers import launching

    seen = []
    monkeypatch.setattr(launching, "launch_recipe", lambda *given: seen.append(given[-1]) or 0)
    import launch as front

    assert front.main(["up", "preflight", "--target", "slurm", "--", "--exclude=a", "-h", "--"]) == 0
    assert seen[0].flags == ("--exclude=a", "-h", "--")


def test_ctrl_c_leaves_with_its_code(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("recipes.commands.training_environment.run_tests", interrupted)
    assert run(capsys, "test") == (130, "", "")


def test_benchmarks_of_your_own_are_named_from_where_the_command_is_given(monkeypatch, tmp_path, capsys):
    from recipes.commands import launch_requests

    seen = []
    monkeypatch.setattr(
        launch_requests, "start_evaluation", lambda _, prompt, names, *a, **b: seen.append(names) or 0
    )
    (tmp_path / "own.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "evaluate", "a/b", "--benchmarks", "math-500,own.jsonl")[0] == 0
    assert seen == [f"math-500,{tmp_path}/own.jsonl"]
