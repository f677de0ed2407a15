"""The second group's files on every target: the right machines, started again after 33 alone, and nothing of
the run is touched.

No program that samples is in this version. A small one of this test's own stands in its place, so that the
rendered shell can run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.platforms import restarts, script, targets
from recipes.presets import RECIPES, get, resolve
from recipes.recipe.sample_group import sampling_machines
from tests.recipes.rendered import make_checkout, make_program, render, render_unchecked
from tests.recipes.test_batch_targets import SRUN
from tests.recipes.test_restarts import CODES, decisions
from tests.recipes.test_targets import CHECK_DSTACK, CHECK_SKY, launched_python, needs_launch, shell_of
from tests.servers import rclone
from trainer.checkpoint.attempt import Attempts
from trainer.config import ConfigError, RunConfig, from_dict, validate
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_OK

ROOT = Path(__file__).parents[2]
ONE, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
PROGRAM = "sampler_of_this_test"
TARGETS = [name for name, can in targets.TARGETS.items() if name != "local" and "ssh" not in name]
"""Those over ssh name machines, `local` is one machine."""
FLEET = ("fleet.workers=only", "rollout.tensor_parallel=1")


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(script, "SAMPLING_PROGRAM", PROGRAM)


def both(name, target, *overrides):
    """(the run's recipe alone, files of both groups) with 4 machines of two GPUs that the target has."""
    gpu = "L40S" if "L40S" in targets.target_named(target).gpus else "A100-80GB"
    count = 8 if target in ("skypilot-aws", "skypilot-lambda") else 2
    group = [f"sample.gpu={gpu}", "sample.nodes=4", f"sample.gpus_per_node={count}"]
    recipe = resolve(name, [*group, *FLEET, *overrides])
    return resolve(name, ["sample=null", *FLEET, *overrides]), render_unchecked(recipe, target)


def sampling_file(name, target, *overrides):
    """Text of the file that starts the sampling machines."""
    files = both(name, target, *overrides)[1]
    return next(text for file, text in files.items() if re.search(r"\.sample\.(yaml|sbatch|pbs)$", file))


# --- Beside the run's files -----------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_the_runs_own_files_are_what_they_are_without_a_second_group(target):
    alone, files = both(ONE, target)
    own = render(alone, target)
    assert list(files)[: len(own)] == list(own) and {name: files[name] for name in own} == own
    beside = [name for name in files if name not in own]
    assert beside and all(name.startswith(f"{ONE}.sample.") for name in beside)


@pytest.mark.parametrize("target", TARGETS)
def test_shell_is_valid_and_touches_nothing_of_the_run(target):
    text = sampling_file(ONE, target)
    shell = shell_of(text)
    assert subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True).stderr == ""
    for word in ("trainer.node", "recipes.records.manifest", "keep .venvs", "driver.sh 36", '"$RUNS/$RUN_ID'):
        assert word not in shell, word
    assert ".cache/$RUN_ID.yaml" not in shell
    assert "begin asked" in shell, "nothing reaches the run but the bucket"
    written = re.search(r"<<YAML\n(.*?)^YAML$", shell, re.S | re.M)
    values = {"RUN_ID": "r", "RUNS": "/runs", "DATA": "/data", "MODELS": "/models", "BUCKET": "s3://mine"}
    config = from_dict(RunConfig, yaml.safe_load(script.fill_placeholders(written[1], values)))
    validate(config)
    machine = 8 if target in ("skypilot-aws", "skypilot-lambda") else 2
    assert (config.placement.nodes, config.placement.workers_per_node) == (1, machine)
    assert (config.run_id, config.fleet.run, config.rollout.tensor_parallel) == ("r", "r", 1)
    assert config.rollout.gpu_memory_utilization == 0.9


def test_a_token_of_the_tracker_or_of_rewards_is_not_given_to_sampling_machines():
    asked = ("logging.wandb=online", "storage.bucket=s3://mine", "rewards.remote_url=http://x/y")
    recipe = resolve(ONE, ["sample.nodes=4", *FLEET, *asked])
    assert set(script.secret_names(sampling_machines(recipe))) == {
        "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SPOTRL_FLEET_KEY"
    }  # fmt: skip
    task = yaml.safe_load(sampling_file(ONE, "dstack-runpod", *asked))
    assert not any("WANDB" in entry or "REWARD" in entry for entry in task["env"])
    assert "SPOTRL_FLEET_KEY" in task["env"], "its value comes from the client"


def test_a_volume_of_the_run_is_not_mounted_by_sampling_machines():
    recipe = resolve(ONE, ["sample.nodes=4", "storage.volume=data", "site.region=US/US-KS-2"])
    files = render_unchecked(recipe, "skypilot-runpod")
    assert "volumes" in yaml.safe_load(files[f"{ONE}.yaml"])
    assert "volumes" not in yaml.safe_load(files[f"{ONE}.sample.yaml"])
    assert f"{ONE}.sample.volume.yaml" not in files
    on_it = resolve(ONE, ["sample.nodes=4", "storage.volume=data", "site.region=US/US-KS-2",
                          "storage.bucket=file:///workspace/runs"])  # fmt: skip
    with pytest.raises(ConfigError, match="throws its machines away"):
        render_unchecked(on_it, "skypilot-runpod")


# --- The machines ---------------------------------------------------------------------------------


def test_skypilot_starts_each_machine_as_a_managed_job_of_its_own():
    text = sampling_file(ONE, "skypilot-runpod")
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 1 and task["name"].endswith("-sample")
    places = task["resources"]["ordered"]
    assert {place["accelerators"] for place in places} == {"L40S:2"}
    assert [place["use_spot"] for place in places] == [True, False]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [33]
    assert "for i in $(seq 4); do sky jobs launch -y -d -n grpo-qwen2-5-vl-7b-mathv60k-sample-$i " in text
    only = yaml.safe_load(sampling_file(ONE, "skypilot-runpod", "sample.spot=only"))["resources"]
    assert only["use_spot"] is True
    pods = ("site.rdma=rdma/ib:8", "site.node_pool=h100", "sample.node_pool=l40s", "sample.gpus_per_node=8")
    task = yaml.safe_load(sampling_file(BIG, "skypilot-kubernetes", *pods))
    spec = task["config"]["kubernetes"]["pod_config"]["spec"]
    assert spec["nodeSelector"] == {"cloud.google.com/gke-nodepool": "l40s"}, "not the run's pool"
    assert "limits" not in spec["containers"][0]["resources"] and "network_tier" not in task["resources"]
    assert task["resources"]["accelerators"] == "L40S:8"
    never = sampling_file(ONE, "skypilot-runpod", "sample.spot=never")
    assert yaml.safe_load(never)["resources"]["use_spot"] is False
    assert "sky launch -y -d -c grpo-qwen2-5-vl-7b-mathv60k-sample-$i " in never
    assert "job_recovery" not in never and "SkyPilot does not start it again" in never


def test_dstack_has_a_fleet_for_all_machines_and_a_run_for_each():
    files = both(ONE, "dstack-runpod")[1]
    task, fleet = (yaml.safe_load(files[f"{ONE}.sample{kind}.yaml"]) for kind in ("", ".fleet"))
    assert task["nodes"] == 1 and fleet["nodes"] == "0..4" and "placement" not in fleet
    assert task["fleets"] == [fleet["name"]] != yaml.safe_load(files[f"{ONE}.yaml"])["fleets"]
    assert task["resources"]["gpu"]["name"] == ["L40S"] and task["resources"]["gpu"]["count"] == 2
    assert task["instance_types"] == ["NVIDIA L40S"]
    assert f"dstack apply -y -d -n {task['name']}-$i -f " in files[f"{ONE}.sample.yaml"]


def test_names_of_sampling_tasks_are_short_enough_for_dstack_and_differ():
    tasks, fleets = [], []
    for name in RECIPES:
        recipe = get(name)
        if recipe.config.method == "grpo" and recipe.kind == "train" and recipe.cluster.gpus_per_node:
            asked = resolve(name, ["sample={gpu: A100-80GB, gpus_per_node: 8}"])
            files = render_unchecked(asked, "dstack-kubernetes")
            tasks.append(yaml.safe_load(files[f"{name}.sample.yaml"])["name"])
            fleets.append(yaml.safe_load(files[f"{name}.sample.fleet.yaml"])["name"])
    assert len(set(tasks)) == len(tasks) > 15 and len(set(fleets)) == len(fleets)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{1,40}", name) for name in fleets), "dstack's own rule"
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{1,37}", name) for name in tasks), "and three more for the number"


def directives(text):
    return re.findall(r"^#(?:SBATCH|PBS) (.*)$", text, re.M)


def test_slurm_starts_an_array_of_one_node_each():
    site = ("site.partition=big", "site.constraint=h100", "site.gres=gpu:h100:8")
    lines = directives(sampling_file(ONE, "slurm", *site))
    assert {"--array=0-3", "--nodes=1", "--gpus-per-node=2", "--requeue", "--partition=big"} <= set(lines)
    assert not any("h100" in line for line in lines), "features and resources of the run's machines"
    own = ("sample.partition=small", "sample.constraint=l40s", "sample.gres=gpu:l40s:2")
    lines = directives(sampling_file(ONE, "slurm", *site, *own))
    assert {"--partition=small", "--constraint=l40s", "--gres=gpu:l40s:2"} <= set(lines)


@pytest.mark.parametrize(("dialect", "option"), [("pro", "-J 0-3"), ("torque", "-t 0-3")])
def test_pbs_starts_an_array_of_one_node_each(dialect, option):
    text = sampling_file(ONE, "pbs", f"site.pbs={dialect}", "sample.partition=small")
    lines = directives(text)
    assert option in lines and "-q small" in lines and "-r y" in lines
    request = next(line for line in lines if line.startswith(("-l select", "-l nodes")))
    assert re.search(r"select=1:|nodes=1:", request) and re.search(r"gpus=2", request)
    alone = directives(sampling_file(ONE, "pbs", f"site.pbs={dialect}", "sample.nodes=1"))
    assert not any(line.startswith(("-J", "-t")) for line in alone), "PBS takes no array of one"


# --- What runs ------------------------------------------------------------------------------------

STAND_IN = """
import os, sys
print("sampling with", sys.argv[2], open(sys.argv[2]).read().count("s3://mine"), flush=True)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def checkout(tmp_path):
    """A working copy with this Python as its environment, prepared data, and the sampling program of this
    test."""
    make_checkout(tmp_path, f'exec {sys.executable} "$@"')
    (tmp_path / "trainer/shell/driver.sh").write_text('echo "driver $1"\n')
    (tmp_path / f"{PROGRAM}.py").write_text(STAND_IN)
    for name, body in (("srun", SRUN), ("scontrol", 'echo "scontrol $*"'), ("sleep", "")):
        make_program(tmp_path / "bin" / name, body)
    (tmp_path / "w/data/mathv60k").mkdir(parents=True)
    (tmp_path / "w/data/mathv60k/manifest.json").write_text("{}")
    (tmp_path / "nodes").write_text("here\n")
    return tmp_path


def ran(checkout, text, code=0, **more):
    """(exit code, output) of the task in a rendered file."""
    path = f"{checkout}/bin:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(checkout), "WORK": str(checkout / "w"), "CODE": str(code)}
    env |= {"RUN_ID": "r", "BUCKET": "s3://mine"}
    env |= {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7"}
    env |= {"PBS_O_WORKDIR": str(checkout), "PBS_JOBID": "9[3].head", "PBS_NODEFILE": str(checkout / "nodes")}
    command = ["bash", "-c", text if text.startswith("#!") else shell_of(text)]
    done = subprocess.run(command, cwd=checkout, env=env | more, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("skypilot-runpod", ".cache/r.sample-0.yaml"),
        ("dstack-runpod", ".cache/r.sample-0.yaml"),
        ("slurm", ".cache/r.sample-7.yaml"),
        ("pbs", ".cache/r.sample-9[3].yaml"),
    ],
)
def test_a_machine_runs_the_program_on_a_configuration_of_its_own(checkout, target, config):
    code, said = ran(checkout, sampling_file(ONE, target))
    assert code == 0, said
    assert f"sampling with {config} 1" in said and "driver 2" in said
    assert [path.name for path in (checkout / ".cache").glob("*.yaml")] == [Path(config).name]
    assert not list((checkout / "w").rglob("runs/r")) and not (checkout / "runs").exists()
    code, said = ran(checkout, sampling_file(ONE, target), RUN_ID="")
    assert "the id of the run is missing" in said
    code, said = ran(checkout, sampling_file(ONE, target), BUCKET="")
    assert "the bucket that checkpoints are pushed to is missing" in said


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An S3 server, and the variables that open its bucket `bucket`."""
    with rclone(tmp_path_factory.mktemp("store")) as server:
        yield server.env | {"PYTHONPATH": str(ROOT), "BUCKET": "s3://bucket"}


@pytest.mark.parametrize("target", ["skypilot-runpod", "dstack-runpod", "slurm", "pbs"])
def test_a_machine_that_comes_when_its_run_is_over_installs_nothing(checkout, store, target):
    """It ends with 0, which no platform starts again after. A run that may go on is sampled for."""
    text = sampling_file(ONE, target, "storage.bucket=s3://bucket")
    run = f"r-{target}"
    record = Attempts(Storage(f"s3://bucket/{run}/attempts", env=os.environ | store))

    def said() -> str:
        code, out = ran(checkout, text, **store | {"RUN_ID": run, "SPOTRL_LAUNCH": "monday"})
        assert code == 0, out
        return out

    assert "driver 2" in said(), "its trainer has not begun"
    held = record.take(0, "monday")
    assert "driver 2" in said()
    record.close(held, EXIT_OK, "", 5)
    over = said()
    assert f"nothing to sample for {run}: the run has reached its last step" in over
    assert "driver 2" not in over or target == "slurm", "Slurm's node looks too, in a shell of its own"


@pytest.mark.parametrize("target", ["slurm", "pbs"])
def test_on_a_shared_file_system_the_run_prepares_and_others_wait(checkout, target):
    for rented in ("skypilot-runpod", "dstack-runpod"):  # with disks of their own
        shell = shell_of(sampling_file(ONE, rented))
        assert "step " in shell and "data_prep prepare mathv60k" in shell and "await" not in shell
    text = sampling_file(ONE, target)
    assert "data_prep" not in text and 'await "${DATA}/mathv60k/manifest.json"' in text
    (checkout / "w/data/mathv60k/manifest.json").unlink()
    code, said = ran(checkout, text, SPOTRL_AWAIT_S="10")
    assert code == 2 and "the run's own job prepares it, start that first" in said
    assert "sampling with" not in said
    # `sleep` of this machine is where the run's job brings the data
    (checkout / "bin/sleep").write_text(f"#!/bin/bash\ntouch {checkout}/w/data/mathv60k/manifest.json\n")
    code, said = ran(checkout, text)
    assert code == 0 and "sampling with" in said


# --- Restarts -------------------------------------------------------------------------------------


def test_slurm_and_dstack_start_again_after_33_alone(checkout):
    """dstack is told 0 after every other code."""
    slurm, dstack = (sampling_file(ONE, target) for target in ("slurm", "dstack-runpod"))
    for code in CODES:
        left, said = ran(checkout, slurm, code)
        assert left == code and ("scontrol requeue 7" in said) == (code == 33), code
        left, said = ran(checkout, dstack, code)
        assert left == (33 if code == 33 else 0), code
        assert (restarts.FINAL in said) == (code not in (0, 33))
        assert "resume" not in said, "a machine is no run"
    assert "scontrol requeue" not in ran(checkout, slurm, 33, SLURM_RESTART_COUNT="20")[1]
    assert ran(checkout, slurm, 0, SLURM_RESTART_COUNT="21")[0] == 2


@needs_launch
def test_the_platforms_parse_the_files_and_skypilot_starts_again_after_33_alone():
    tasks = {"pod": sampling_file(ONE, "skypilot-runpod"), "gcp": sampling_file(ONE, "skypilot-gcp")}
    for counts in decisions(tasks, {}).values():
        assert {code for code, count in zip(CODES, counts, strict=False) if count} == {33}
    for prefix, check in (("skypilot", CHECK_SKY), ("dstack", CHECK_DSTACK)):
        mine = {}
        for target in TARGETS:
            found = both(ONE, target)[1] if target.startswith(prefix) else {}
            mine |= {f"{target}/{name}": text for name, text in found.items() if ".sample." in name}
        parsed = launched_python(check, mine)
        assert parsed.keys() == mine.keys()
        assert {name: error for name, error in parsed.items() if isinstance(error, str)} == {}
