"""The command line: answers at once, one line for what it refuses, and the commands that it gives to the
engines."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

import launch
from recipes.commands import training_environment
from recipes.drivers import launch_tokens
from recipes.plan import cost
from recipes.platforms import dstack, ssh
from recipes.presets import resolve
from recipes.records import run_process, run_record
from recipes.records.run_record import RunRecord
from tests import servers
from tests.recipes.rendered import launch_commands
from trainer.config import ConfigError

ROOT = Path(__file__).parents[2]


def processor_seconds(command: str, tmp_path: Path) -> float:
    """Processor time of one call; modules are compiled before, as they are on a desk."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "launch.py", command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "demo" in done.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_commands_answer_quickly(tmp_path):
    """A quarter of a second for help where the machine is quiet; the list, whose figures are kept, takes
    little more. Compared call by call, so that both meet the same machine."""
    pairs = [[processor_seconds(command, tmp_path) for command in ("--help", "list")] for _ in range(6)]
    assert min(usage for usage, _ in pairs) < 1.0
    assert min(listed / usage for usage, listed in pairs[1:]) < 2, "the first pair compiles and plans"


@pytest.mark.parametrize(
    "given", [["test", "-m", "lab"], ["test"], ["data", "--help"], ["data", "prepare", "--name=x"]]
)
def test_tests_and_data_get_their_arguments_whole(given, monkeypatch):
    passed = []
    for what, function in (("test", "run_tests"), ("data", "prepare_data")):
        name = f"recipes.commands.training_environment.{function}"
        monkeypatch.setattr(name, lambda arguments, what=what: passed.append((what, arguments)) or 0)
    assert launch.main(given) == 0
    assert passed == [(given[0], given[1:])]


@pytest.mark.parametrize(
    ("there", "arguments", "expected"),
    [
        ((), ["prepare", "a.csv"], "data"),
        (("cpu",), ["prepare", "a.csv"], "cpu"),
        (("cpu", "data"), ["verify", "d"], "data"),
        (("data", "test"), ["show", "d", "--mask"], "test"),
    ],
)
def test_data_runs_in_the_smallest_environment_that_has_what_it_needs(
    monkeypatch, tmp_path, there, arguments, expected
):
    for name in there:
        (tmp_path / ".venvs" / name).mkdir(parents=True)
        (tmp_path / ".venvs" / name / ".stamp").touch()
    monkeypatch.chdir(tmp_path)
    calls = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(training_environment.subprocess, "run", lambda words: calls.append(words) or done)
    assert training_environment.prepare_data(arguments) == 0
    python = f".venvs/{expected}/bin/python"
    assert calls == [["bash", "trainer/shell/setup.sh", expected], [python, "-m", "data_prep", *arguments]]


@pytest.mark.parametrize("given", [["data"], ["data", "--help"], ["data", "prepare", "--help"]])
def test_help_of_data_needs_no_environment(given):
    command = [sys.executable, "launch.py", *given]
    # no bash, no set-up
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    said = done.stdout
    assert done.returncode == 0, done.stderr
    assert all(name in said for name in ("mathv60k", "mathvista", "launch.py data prepare"))
    assert "prepare" in given or all(f"\n  {name} " in said for name in ("prepare", "verify", "overlap"))


def test_the_demo_of_sft_trains_an_adapter_on_the_other_demos_model(capsys):
    shown = {}
    for method in ("grpo", "sft-lora"):
        code, shown[method], _ = run(capsys, "demo", "--method", method, "--run-id", "mine", "--dry-run")
        assert code == 0 and f"method: {method.partition('-')[0]}" in shown[method]
    models = [re.findall(r"demo-[0-9a-f]{8}", text)[0] for text in shown.values()]
    assert models[0] == models[1] and "rank: 16" in shown["sft-lora"] and "zero_stage: 2" in shown["sft-lora"]


def test_dry_run_shows_task_and_commands_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY-ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TOP-SECRET")
    code, out, _ = run(
        capsys,
        "up",
        "grpo-qwen2.5-vl-7b-mathv60k",
        "--target",
        "skypilot-runpod",
        "--bucket",
        "s3://mine",
        "--run-id",
        "mine",
        "--dry-run",
    )
    assert code == 0 and "num_nodes: 1" in out and "TOP-SECRET" not in out and "KEY-ID" not in out
    last = out.strip().splitlines()[-1]
    assert "sky jobs launch -y -n mine" in last and "--env RUN_ID=mine --env BUCKET=s3://mine" in last
    assert "--secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY" in last
    assert not (tmp_path / "runs").exists()


def test_slurm_job_is_submitted_recorded_shown_and_cancelled(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", 'test "$RUN_ID" = mine && echo "77;cluster"')
    stand_in(tmp_path, monkeypatch, "squeue", "")
    stand_in(tmp_path, monkeypatch, "scancel", "")
    code, out, _ = run(capsys, "up grpo-qwen2.5-vl-7b-mathv60k --target slurm --run-id mine --detach")
    assert code == 0 and "run mine on slurm" in out
    record = run_record.load_record("mine")
    assert (record.cluster, record.target, record.recipe) == ("77", "slurm", "grpo-qwen2.5-vl-7b-mathv60k")
    run(capsys, "status", "mine")
    run(capsys, "down", "mine")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("sbatch --parsable --output=") and calls[0].endswith(
        "grpo-qwen2.5-vl-7b-mathv60k.sbatch"
    )
    assert calls[1:] == ["squeue -j 77", "scancel 77"]
    kept = json.loads((tmp_path / "runs/mine/manifest.json").read_text())["launch"]
    assert kept["target"] == "slurm" and len(kept["commit"]) == 40 and "gpu.txt" in kept["locks"]


def test_resume_goes_back_to_before_a_step(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 1")
    stand_in(tmp_path, monkeypatch, "tail", ":")
    recipe = "grpo-qwen2.5-vl-7b-mathv60k"
    run(capsys, f"up {recipe} --target slurm --run-id mine --detach --set run.seed=7")
    assert "seed: 7" in run(capsys, "resume mine --dry-run")[1], "the same run again"
    code, out, err = run(capsys, "resume", "mine", "--before", "120")
    assert code == 0, err
    code, out, _ = run(capsys, "resume", "mine", "--dry-run")
    assert code == 0 and "before: 120" in out, "it goes on in the history that it went back to"
    code, _, err = run(capsys, "resume", "mine", "--before", "120")
    assert code == 2 and "has gone back to before that step" in err and err.count("\n") == 1
    code, out, _ = run(capsys, "resume", "mine", "--before", "90", "--dry-run")
    assert code == 0 and "before: 90" in out and "before: 120" not in out
    code, _, err = run(capsys, "resume", "mine", "--before", "-3")
    assert code == 2 and "give a step of the run" in err


def test_a_bucket_that_cannot_be_used_is_refused_before_anything_is_rented(capsys, monkeypatch, tmp_path):
    """The real probe against a real S3 server: a bucket that is there, one that is not, and a wrong
    secret."""
    stand_in(tmp_path, monkeypatch, "sbatch", 'echo "77"')
    up = ["up", "grpo-qwen2.5-vl-7b-mathv60k", "--target", "slurm", "--detach", "--run-id"]
    with servers.rclone(tmp_path / "disk") as server:
        for name, value in servers.s3_environment(server.port).items():
            monkeypatch.setenv(name, value)
        code, _, err = run(capsys, *up, "a", "--bucket", "s3://bucket/runs")
        assert code == 0, err
        code, _, err = run(capsys, *up, "b", "--bucket", "s3://nothing-here")
        assert code == 2 and "nothing-here" in err and err.count("\n") == 1
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        code, _, err = run(capsys, *up, "c", "--bucket", "s3://bucket/runs")
        assert code == 2 and err.count("\n") == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_tokens_are_found_where_their_tools_keep_them(monkeypatch, tmp_path):
    for folder in (".aws", ".cloudflare", ".cache/huggingface"):
        (tmp_path / folder).mkdir(parents=True)
    section = "aws_access_key_id = {0}\naws_secret_access_key = {0}%secret\n"
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\n{section.format('d')}[work]\n{section.format('w')}"
    )
    (tmp_path / ".cloudflare/r2.credentials").write_text("[r2]\n" + section.format("r"))
    (tmp_path / ".cloudflare/accountid").write_text("account\n")
    (tmp_path / ".cache/huggingface/token").write_text("hf_x\n")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password wandb_x\n")
    (tmp_path / ".netrc").chmod(0o600)
    (tmp_path / "key.json").write_text('{"type": "service_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("WANDB_API_KEY", "given")
    monkeypatch.delenv("HF_HOME", raising=False)
    assert launch_tokens.find_tokens() == {
        "HF_TOKEN": "hf_x",
        "WANDB_API_KEY": "given",
        "AWS_ACCESS_KEY_ID": "w",
        "AWS_SECRET_ACCESS_KEY": "w%secret",
        "R2_ACCESS_KEY_ID": "r",
        "R2_SECRET_ACCESS_KEY": "r%secret",
        "GOOGLE_SERVICE_ACCOUNT_KEY": '{"type": "service_account"}',
    }
    assert launch_tokens.find_settings()["R2_ACCOUNT_ID"] == "account"


def test_a_rented_gpu_can_be_left_alone():
    recipe = resolve(
        "demo", ["setup=cpu", "cluster.gpus_per_node=1", "cluster.gpu=A100-80GB", "cluster.spot=prefer"]
    )
    assert (recipe.config.placement.device, recipe.config.placement.workers_per_node) == ("cpu", 2)
    assert cost.node_prices(recipe, "skypilot-runpod")[0][0] == pytest.approx(1.39)
    assert cost.node_prices(recipe, "slurm") == []


def test_a_recipe_for_gpus_is_tried_with_one_cpu_rank_a_node():
    """Not with as many as its nodes have GPUs, which no machine without them has processors for."""
    recipe = resolve("preflight", ["cluster.nodes=2", "cluster.gpus_per_node=0", "setup=cpu"])
    assert (recipe.config.placement.device, recipe.config.placement.world_size) == ("cpu", 2)


def test_names_and_addresses_are_what_platforms_take():
    run_id = run_record.new_run_id("grpo-qwen2.5-vl-72b-geometry3k")
    assert run_record.check_run_id(run_id) == run_id
    assert len(dstack.run_name(run_id)) <= 40 and dstack.run_name("short") == "short"
    assert dstack.run_name(run_id) != dstack.run_name(run_id[:-1] + "x")
    assert ssh.parse_address("a") == ("a", "a", 22)
    assert ssh.parse_address("root@1.2.3.4:2201") == ("root@1.2.3.4", "1.2.3.4", 2201)
    assert ssh.parse_address("root@1.2.3.4:2201/10.65.0.2") == ("root@1.2.3.4", "10.65.0.2", 2201)
    for host in ("", "a:b", "-oProxyCommand=x", "a b", "a/"):
        with pytest.raises(ConfigError, match="write it as"):
            ssh.parse_address(host)


def test_dstack_takes_the_hubs_token_from_the_environment_where_there_is_one():
    record = RunRecord(run_id="mine", recipe="r", target="dstack-runpod")

    def given(secrets):
        return launch_commands(record, ["t.yaml"], {"RUN_ID": "mine"}, secrets, False).up[-1][7:]

    assert given(["HF_TOKEN", "AWS_ACCESS_KEY_ID"]) == ["-e", "RUN_ID=mine", "-e", "HF_TOKEN"]
    temporary = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
    assert given(temporary)[3::2] == temporary, "the session's token, with the keys that it belongs to"
    assert given(["AWS_ACCESS_KEY_ID"]) == ["-e", "RUN_ID=mine"]
    files = ["t.yaml", "t.fleet.yaml", "t.volume.yaml"]
    commands = launch_commands(record, files, {"RUN_ID": "mine"}, [], False)
    assert [command[4] for command in commands.up] == ["t.volume.yaml", "t.fleet.yaml", "t.yaml"]


def test_an_interrupted_demo_is_found_and_a_finished_or_other_one_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(run_record, "RUNS", tmp_path)

    def run(name, status, overrides=(), pid=2**30, model="demo-abc", config=True):
        started = float(len(list(tmp_path.iterdir())))
        run_record.RunRecord(
            run_id=name, recipe="demo", target="local", overrides=list(overrides), started_s=started
        ).save()
        if config:
            (tmp_path / name / "config.yaml").write_text(f"path: /x/{model}\n")
            (tmp_path / name / "progress.json").write_text(json.dumps({"status": status, "pid": pid}))
        os.utime(tmp_path / name / "launch.json", (-started, -started))  # written again when a run ends

    def find(overrides=()):
        return run_process.interrupted_run("demo", "local", list(overrides), "demo-abc")

    assert find() == ""
    run("demo-a", "running")
    assert find() == "demo-a" and find(["run.seed=1"]) == ""
    run("demo-b", "running", pid=os.getpid())
    run("demo-c", "running", model="demo-of-older-code")
    run("demo-d", "", config=False)
    run("demo-e", "failed", ["run.seed=1"])
    assert find() == "demo-d", "killed before its trainer began: its preparation goes on where it was"
    assert find(["run.seed=1"]) == "demo-e"
    run("demo-f", "finished")
    assert find() == ""


@pytest.mark.parametrize(("killed", "found"), [(True, "demo-a"), (False, "")])
def test_a_demo_waits_for_the_processes_of_a_killed_one_and_leaves_a_running_one_alone(
    killed, found, monkeypatch, tmp_path
):
    monkeypatch.setattr(run_record, "RUNS", tmp_path)
    monkeypatch.setattr(run_process, "GOING_DOWN_S", 30.0 if killed else 0.3)
    run_record.RunRecord(run_id="demo-a", recipe="demo", target="local").save()
    (tmp_path / "demo-a/config.yaml").write_text("path: /x/demo-abc\n")
    with subprocess.Popen(["sleep", "60"]) as driver:
        (tmp_path / "demo-a/progress.json").write_text(json.dumps({"status": "running", "pid": driver.pid}))

        def end():
            driver.kill()
            driver.wait()  # until then its entry in /proc stays

        timer = threading.Timer(0.5, end)
        if killed:
            timer.start()
        began = time.monotonic()
        assert run_process.interrupted_run("demo", "local", [], "demo-abc") == found
        waited = time.monotonic() - began
        assert 0.4 < waited < 30 if killed else 0.3 <= waited < 30
        end()


def test_data_reads_files_and_writes_folders_where_the_command_is_given(monkeypatch, tmp_path):
    passed = []
    monkeypatch.setattr(
        "recipes.commands.training_environment.prepare_data", lambda given: passed.append(given) or 0
    )
    for name in ("mine.jsonl", "photos.zip", "a=b.csv"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    given = [
        "prepare",
        "mine.jsonl=2",
        "a=b.csv",
        "geometry3k=0.5",
        "--images=photos.zip",
        "--out",
        "made",
        "--rows=5",
    ]
    assert launch.main(["data", *given]) == 0
    here = tmp_path
    sources = [f"{here}/mine.jsonl=2", f"{here}/a=b.csv", "geometry3k=0.5"]
    options = [f"--images={here}/photos.zip", "--out", f"{here}/made", "--rows=5"]
    assert passed == [["prepare", *sources, *options]]
    monkeypatch.chdir(tmp_path)
    assert launch.main(["data", "prepare", "mine.jsonl", "--out=s3://mine/rows"]) == 0
    assert passed[-1] == ["prepare", f"{here}/mine.jsonl", "--out=s3://mine/rows"]


def test_what_is_read_and_written_is_named_from_where_the_command_is_given(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/manifest.json").write_text('{"format": -1}')

    def here(*arguments):
        monkeypatch.chdir(tmp_path)
        return run(capsys, *arguments)

    assert here("render", "demo", "--target", "local", "--out", "files")[0] == 0
    assert (tmp_path / "files/demo.sh").exists()
    for given in ("mine", "mine/manifest.json"):
        assert f"{tmp_path}/mine/manifest.json has format -1" in here("reproduce", given)[2]
    assert f"no run at {tmp_path}/mine" in here("report", "mine")[2]


def test_dry_run_over_ssh_shows_what_every_machine_gets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    code, out, _ = run(capsys, "up", "preflight", "--target", "ssh", "--hosts", "me@a,b:2201", "--dry-run")
    commands = out.partition("# --- which runs")[2]
    assert code == 0 and "secret-token" not in out
    assert [commands.count(word) for word in ("rsync -az", "scp -q", "setsid bash")] == [2, 2, 2]
    assert "SPOTRL_NODE_RANK=1" in commands and "-p 2201" in commands


def test_ctrl_c_is_obeyed_by_the_command_in_the_foreground_in_its_own_time(tmp_path):
    """A command that needs a second to save, twice what `subprocess.run` would leave it before killing it."""
    slow = (
        f"trap 'sleep 1; touch {tmp_path}/saved; exit 33' INT; touch {tmp_path}/up; while :; do sleep 0.1;"
        " done"
    )
    code = f"""
import os, signal, sys
from recipes.drivers.launching import _foreground
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background has it ignored
sys.exit(_foreground(['bash', '-c', {slow!r}], os.environ) != (33, True))"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 0
    assert (tmp_path / "saved").exists()
