"""Retry rules of every engine over exit codes: the rendered shell is run, then the engine's own code
decides."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from recipes.platforms import restarts
from recipes.presets import get
from tests.recipes.rendered import main_file, make_checkout, make_program
from tests.recipes.test_batch_targets import SRUN
from trainer.system.exit_codes import FINAL_EXIT_CODES, RECOVER_EXIT_CODES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
needs_launch = pytest.mark.skipif(
    not LAUNCH.exists(), reason="no .venvs/launch: bash trainer/shell/setup.sh launch"
)
CODES = (0, 1, 2, 33, 34, 35, 36, 37, 38, 39, 130, 137, 139)
AGAIN = {33, 34, 35, 36, 39}
BIG, ONE = "grpo-qwen2.5-vl-72b-mathv60k", "grpo-qwen2.5-vl-7b-mathv60k"
WAIT = (
    "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os._exit(130)); "
    "signal.signal(signal.SIGTERM, lambda *_: os._exit(33)); print('up', flush=True); time.sleep(60)"
)
SEVERAL_NODES = (
    [2, 137, 137, 137],
    [1, 137, 137, 137],
    [37, 37, 137, 137],
    [33, 137, 137, 137],
    [34, 34, 137, 34],
)
"""As SkyPilot reports several nodes: once one has failed, it ends the others and writes 137 for each."""


def test_the_codes_that_are_restarted_are_those_that_a_restart_can_cure():
    assert set(RECOVER_EXIT_CODES) == AGAIN and not AGAIN & set(FINAL_EXIT_CODES)


@pytest.fixture
def checkout(tmp_path):
    """A working copy whose `trainer.node` leaves with $CODE."""
    waits = f'[ "$CODE" != wait ] || exec {sys.executable} -c "{WAIT}"'
    node = f'[ "$2" = trainer.node ] || exit 0\n{waits}\nexit $CODE'
    make_checkout(tmp_path, node, setup="exit ${SETUP_CODE:-0}")
    for name, body in (("srun", SRUN), ("scontrol", 'echo "scontrol $*"'), ("sleep", "")):
        make_program(tmp_path / "bin" / name, body)
    return tmp_path


def environment(checkout, code, **more):
    env = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "HOME": str(checkout), "CODE": str(code)}
    env |= {"WORK": str(checkout / "w"), "RUN_ID": "r", "BUCKET": "s3://mine"}
    return env | more


def dstack_shell(checkout, task):
    """The task's command as dstack's runner starts it: an interactive bash."""
    return ["bash", "-i", "-c", " && ".join(yaml.safe_load(task)["commands"])]


def ends_with(checkout, command, code, **more):
    env = environment(checkout, code, **more)
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def decisions(sky, dstack):
    """Restarts in a row, by SkyPilot's and dstack's own code; CODES of one node, then SEVERAL_NODES, for
    SkyPilot."""
    asked = {"sky": sky, "dstack": dstack, "codes": [[code] for code in CODES] + list(SEVERAL_NODES)}
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [LAUNCH, "tests/recipes/engine_rules.py"]
    done = subprocess.run(command, input=json.dumps(asked), text=True, capture_output=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@needs_launch
def test_skypilot_starts_again_after_our_codes_alone():
    tasks = {"one": main_file(ONE, "skypilot-runpod"), "any": main_file(ONE, "skypilot")}
    tasks |= {"many": main_file(BIG, "skypilot-gcp"), "pods": main_file(BIG, "skypilot-kubernetes")}
    found = decisions(tasks, {})
    for name in ("one", "any", "many", "pods"):
        assert {code for code, count in zip(CODES, found[name], strict=False) if count} == AGAIN, name
        assert [count > 0 for count in found[name][len(CODES) :]] == [False, False, False, True, True], name
    check = main_file("preflight", "skypilot-gcp")
    assert "job_recovery" not in check, "a failed preflight is the answer, not a reason to rent again"


@needs_launch
@pytest.mark.long
@pytest.mark.parametrize(("name", "target"), [(ONE, "dstack-gcp"), (BIG, "dstack-runpod")])
def test_dstack_starts_again_after_our_codes_alone(checkout, name, target):
    task = main_file(name, target)
    said = {code: ends_with(checkout, dstack_shell(checkout, task), code) for code in CODES}
    for code in CODES:
        assert said[code][0] == (code if code in AGAIN else 0), said[code]
        assert (restarts.FINAL in said[code][1]) == (code not in AGAIN and code != 0), (
            "0 alone would look like success"
        )
    nodes = get(name).cluster.nodes
    found = decisions({}, {"run": (task, [[said[code][0]] * nodes for code in CODES] + [[1] * nodes])})["run"]
    assert {code for code, count in zip(CODES, found, strict=False) if count} == AGAIN
    assert found[-1] > 10, "dstack itself restarts after 1 for ever: the mapping is what stops it"


def test_what_fails_before_training_is_told_to_dstack_like_the_rest(checkout):
    shell = dstack_shell(checkout, main_file(ONE, "dstack-gcp"))
    assert ends_with(checkout, shell, 0, SETUP_CODE="2")[0] == 0
    assert ends_with(checkout, shell, 0, SETUP_CODE="36")[0] == 36
    code, said = ends_with(checkout, shell, 0, RUN_ID="")
    assert code == 0 and "give RUN_ID" in said and restarts.FINAL in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 33)])
def test_signals_reach_the_node_through_dstacks_shell(checkout, number, code):
    command = dstack_shell(checkout, main_file(ONE, "dstack-gcp"))
    how = {"cwd": checkout, "env": environment(checkout, "wait"), "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how)
    assert process.stdout and process.stdout.readline() == "up\n"
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(20) == (code if code in AGAIN else 0) and time.monotonic() - started < 10


@pytest.mark.parametrize("restarted", [0, 19, 20, 21, 1000])
def test_slurm_is_asked_for_a_requeue_after_our_codes_while_its_own_count_allows(checkout, restarted):
    (checkout / "job").write_text(main_file(BIG, "slurm"))
    given = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(checkout), "SLURM_RESTART_COUNT": str(restarted)}
    for code in CODES:
        left, said = ends_with(checkout, ["bash", "job"], code, **given)
        started = restarted <= get(BIG).budget.max_requeues
        assert left == (code if started else 2)
        assert ("scontrol requeue 7" in said) == (code in AGAIN and restarted < get(BIG).budget.max_requeues)
        assert (restarts.FINAL in said) == (not started or (code in AGAIN and restarted == 20))


def test_slurm_excludes_machines_that_failed_their_checks_and_never_requeues_a_preflight(checkout):
    (checkout / "job").write_text(main_file(BIG, "slurm"))
    (checkout / "runs/r").mkdir(parents=True)
    (checkout / "runs/r/refused").write_text("gpu-7\ngpu-3\ngpu-7\n")
    given = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(checkout)}
    for code in (34, 36):
        said = ends_with(checkout, ["bash", "job"], code, **given)[1]
        assert ("scontrol update JobId=7 ExcNodeList=gpu-3,gpu-7" in said) == (code == 36)
    (checkout / "job").write_text(main_file("preflight", "slurm"))
    left, said = ends_with(checkout, ["bash", "job"], 36, **given)
    assert left == 36 and "requeue" not in said


def test_pbs_that_starts_a_job_for_ever_is_stopped_by_its_own_count(checkout):
    (checkout / "job").write_text(main_file(ONE, "pbs", "budget.max_requeues=2"))
    (checkout / "nodes").write_text("alpha\n")
    given = {"PBS_JOBID": "7.x", "PBS_O_WORKDIR": str(checkout), "PBS_NODEFILE": str(checkout / "nodes")}
    left = [ends_with(checkout, ["bash", "job"], 34, **given)[0] for _ in range(5)]
    assert left == [34, 34, 34, 2, 2]
    assert ends_with(checkout, ["bash", "job"], 0, **given | {"PBS_JOBID": "8.x"})[0] == 0


@pytest.mark.parametrize("target", ["slurm", "pbs"])
def test_a_batch_job_without_a_run_id_is_named_by_its_number(target, checkout):
    """Two jobs of one file are two runs; a job that is started again resumes with its own."""
    text = main_file(ONE, target)
    line = next(line for line in text.splitlines() if line.startswith("export RUN_ID="))
    env = {"SLURM_JOB_ID": "77", "PBS_JOBID": "77.server"}
    done = subprocess.run(
        ["bash", "-c", f"{line}\necho $RUN_ID"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "grpo-qwen2-5-vl-7b-mathv60k-77\n"


@needs_launch
def test_files_for_rented_machines_want_a_run_id():
    for target in ("skypilot-runpod", "skypilot", "skypilot-gcp", "skypilot-kubernetes"):
        assert yaml.safe_load(main_file(ONE, target))["envs"]["RUN_ID"] is None
    code = (
        "import sys, sky, yaml; "
        "sky.Task.from_yaml_config(yaml.safe_load(sys.stdin), [('BUCKET', 's3://mine')])"
    )
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [LAUNCH, "-c", code], input=main_file(ONE, "skypilot"), capture_output=True, text=True, env=env
    )
    assert done.returncode != 0 and "RUN_ID" in done.stderr
    assert yaml.safe_load(main_file(ONE, "dstack-gcp"))["env"][0] == "RUN_ID"
