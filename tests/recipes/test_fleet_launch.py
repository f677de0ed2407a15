"""A run with machines that sample for it: started by one command or one by one, seen, and ended together."""

import json
import re
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import fleet_launch, launched_run, launching
from recipes.platforms.targets import TARGETS
from recipes.presets import resolve
from recipes.records import run_record
from tests.recipes.rendered import launch_commands
from trainer.config import ConfigError

SEVEN, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
UP = ["up", SEVEN, "--bucket", "s3://mine", "--run-id", "mine", "--detach"]
KEY = "SPOTRL_FLEET_KEY"
THREE = "grpo-qwen2.5-vl-3b-geometry3k"


def called(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def workers():
    (record,) = run_record.workers_of("mine")
    return record


def launched(capsys, monkeypatch, tmp_path, fleet):
    """Starts the run with a fleet on SkyPilot, which takes everything."""
    stand_in(tmp_path, monkeypatch, "sky", "exit 0")
    run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", fleet)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xL40S", ["sample.nodes=4", "sample.gpus_per_node=1", "sample.gpu=L40S", "sample.spot=prefer"]),
        ("4xL40S:spot", ["sample.nodes=4", "sample.gpus_per_node=1", "sample.gpu=L40S", "sample.spot=only"]),
        ("2x8xA100-80GB:on-demand", ["sample.gpus_per_node=8", "sample.gpu=A100-80GB", "sample.spot=never"]),
        ("4xL40S:spot@skypilot-runpod", ["sample.target=skypilot-runpod", "sample.spot=only"]),
        ("3", ["sample.nodes=3", "sample.gpus_per_node=0", "sample.spot=prefer"]),
    ],
)
def test_a_fleet_is_written_in_a_word(text, said):
    assert set(said) < set(
        fleet_launch.fleet_overrides(text)
    ) and "fleet.workers=only" in fleet_launch.fleet_overrides(text)


@pytest.mark.parametrize("text", ["", "0xL40S", "L40S", "4xL40S:cheap", "4x", "4xL40S@"])
def test_a_word_that_names_no_fleet_is_refused(text):
    with pytest.raises(ConfigError, match="write it as 4xL40S"):
        fleet_launch.fleet_overrides(text)


def test_one_command_starts_the_run_and_then_a_job_for_each_machine(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sky", f'test -n "${KEY}" && echo "key ${KEY}" >> {tmp_path}/keys')
    code, out, err = run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", "4xL40S:spot")
    assert code == 0, err
    record, mine = run_record.load_record("mine"), workers()
    price = record.usd_per_hour + mine.usd_per_hour
    assert f"both     ${price:.2f} per hour, workers until the run ends" in out
    assert re.search(r"planned +[\d.]+ h and \$\d+, .* with rollout.staleness=0: loss", out)
    assert (mine.jobs, mine.samples_for, mine.bucket) == (4, "mine", "s3://mine")
    hours = float(re.search(r"planned +([\d.]+) h", out)[1])
    assert record.planned_hours == mine.planned_hours == pytest.approx(hours, abs=0.1)
    assert mine.planned_usd == pytest.approx(mine.planned_hours * mine.usd_per_hour)
    launches = [call for call in called(tmp_path) if "jobs launch" in call]
    names = [re.search(r"-n (\S+)", call)[1] for call in launches]
    assert names == ["mine", *[f"{mine.run_id}-{i}" for i in range(1, 5)]], "the run's is first"
    assert all(" -d " in call and f"--secret {KEY}" in call for call in launches)
    assert len(set((tmp_path / "keys").read_text().splitlines())) == 1, "one secret for all of them"
    token = (run_record.RUNS / "mine/fleet.key").read_text()
    assert len(token) >= 16 and not any(token in call for call in launches)
    given = {re.search(r"SPOTRL_LAUNCH=(\w+)", call)[1] for call in launches}
    assert len(given) == 1, "workers wait for this launch of the run, whatever became of earlier ones"
    task = (run_record.RUNS / mine.run_id / "task" / f"{SEVEN}.sample.yaml").read_text()
    assert "  run: mine\n" in task and "trainer.fleet.machine --config" in task
    assert "launch.py up rollout-worker --set fleet.run=mine --target skypilot-runpod" in task


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "local"])
def test_every_target_has_files_and_commands_for_both_groups(target, capsys):
    """On a dry run, which names what would be started."""
    has = TARGETS[target].gpus
    gpu = "L40S" if "L40S" in has else "A100-80GB"
    count = "8x" if target == "skypilot-lambda" else ""
    hosts = ["--hosts", "a", "--set", "sample.hosts=[b,c]"] if target.endswith("ssh") else []
    asked = [*UP, "--dry-run", "--target", target, "--fleet", f"2x{count}{gpu}", *hosts]
    code, out, err = run(capsys, *asked)
    assert code == 0, err
    own, theirs = out.split("# --- would run")[1:]
    assert "trainer.fleet.machine" not in out.split("# --- would run")[0]
    assert "runs/mine-w" in own and "trainer.fleet.machine --config" in own, "files of the second group"
    assert "RUN_ID=mine " in own and "RUN_ID=mine-w" in theirs


def test_engines_of_the_72b_recipe_are_all_gpus_of_a_smaller_machine(capsys):
    """Those of the recipe's own GPUs are eight, and one GPU does not hold the model."""
    asked = ["up", BIG, "--bucket", "s3://mine", "--run-id", "mine", "--target", "dstack-runpod", "--dry-run"]
    code, out, err = run(
        capsys, *asked, "--set", "rollout.staleness=2", "--fleet", "2x4xA100-80GB@skypilot-runpod"
    )
    assert code == 0, err
    assert re.search(r"workers  mine-w\w+: 2 x 4 A100-80GB on skypilot-runpod, \$", out)
    assert re.search(r"planned +[\d.]+ h", out)
    own, theirs = out.split("# --- would run")[:2]
    assert "    tensor_parallel: 8\n" in own and "    workers_per_node: 8\n" in own
    assert "    tensor_parallel: 4\n" in theirs and "    workers_per_node: 4\n" in theirs
    assert "accelerators: A100-80GB-SXM:4" in theirs and "trainer.fleet.machine --config" in theirs


def test_workers_of_a_run_on_this_machine_are_processes_of_one(capsys):
    demo = ["up", "demo", "--bucket", "file:///bucket", "--run-id", "mine", "--target", "local", "--dry-run"]
    code, out, err = run(capsys, *demo, "--fleet", "2")
    assert code == 0, err
    assert "2 without a GPU on local" in out and out.count("trainer.fleet.machine --config") == 1
    assert "workers_per_node: 2" in out.rpartition("# --- would run")[0]


def test_down_ends_both_the_workers_first(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "2xL40S:on-demand")
    mine = workers()
    (tmp_path / "calls").unlink()
    assert run(capsys, "down", "mine")[0] == 0
    ends = [call for call in called(tmp_path) if " down " in call or " cancel " in call]
    assert ends == [
        f"sky down -y {mine.run_id}-1",
        f"sky down -y {mine.run_id}-2",
        "sky jobs cancel -y -n mine",
    ]
    assert workers().ended_s and run_record.load_record("mine").ended_s
    (tmp_path / "calls").unlink()
    run(capsys, "down", "mine")
    assert not [call for call in called(tmp_path) if mine.run_id in call], "they have been given back"


def test_a_run_that_no_worker_could_be_started_for_is_ended(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sky", 'case "$*" in *"-n mine-w"*) exit 3 ;; esac')
    code, out, _ = run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", "2xL40S:spot")
    assert code == 3 and "no machine samples for mine, so it is ended" in out
    assert any(call.startswith("sky jobs cancel -y -n mine") for call in called(tmp_path))


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_workers_that_could_be_started_in_part_are_ended_with_their_run(
    market, capsys, monkeypatch, tmp_path
):
    stand_in(tmp_path, monkeypatch, "sky", 'case "$*" in *launch*-w????-2*) exit 3 ;; esac')
    assert run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", f"3xL40S:{market}")[0] == 3
    mine, ends = workers().run_id, "sky jobs cancel -y -n" if market == "spot" else "sky down -y"
    assert {f"{ends} {mine}-1", "sky jobs cancel -y -n mine"} < set(called(tmp_path))


def test_ctrl_c_amid_a_launch_of_workers_ends_both(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sky", "exit 0")
    start = launching.start_launch

    def interrupted(launch):
        if start(launch) or launch.record.samples_for:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(launching, "start_launch", interrupted)
    with suppress(KeyboardInterrupt):
        run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", "2xL40S:spot")
    ends = [call.split()[-1] for call in called(tmp_path) if "cancel" in call]
    assert ends == [f"{workers().run_id}-1", f"{workers().run_id}-2", "mine"]


def test_on_this_machine_workers_that_were_started_end_with_the_launch_that_failed(monkeypatch, capsys):
    """The run itself was never begun."""
    ended = []

    def fails(launch):
        launch.record.save()
        raise ConfigError("no")

    monkeypatch.setattr(launching, "start_launch", fails)
    monkeypatch.setattr(
        launched_run, "drive_run", lambda run, what, dry_run=False: ended.append((run, what)) or 0
    )
    monkeypatch.setattr(launching, "check_prepared", lambda launch: None)
    demo = ["up", "demo", "--bucket", "file:///bucket", "--run-id", "mine", "--target", "local"]
    assert run(capsys, *demo, "--fleet", "2")[0] == 2
    assert ended == [(workers().run_id, "down")]


def queue_of(*states):
    """The body of a `sky` whose queue has the run in the next of these states at each look."""
    rows = [json.dumps([{"job_id": 1, "job_name": "mine", "status": one}]) for one in states]
    looks = " ".join(f"'{row}'" for row in rows)
    return f"""case "$*" in *queue*) n=$(grep -c queue "${{0%/*}}/../calls"); a=({looks})
      i=$((n > {len(rows)} ? {len(rows)} : n)); echo "${{a[$((i - 1))]}}" ;; esac"""


def test_workers_are_rented_when_the_run_has_its_machines(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(fleet_launch, "LOOK_S", 0.01)
    stand_in(tmp_path, monkeypatch, "sky", queue_of("PENDING", "STARTING", "RUNNING"))
    follows = [word for word in UP if word != "--detach"]
    code, out, err = run(capsys, *follows, "--target", "skypilot-runpod", "--fleet", "1xL40S:spot")
    assert code == 0, err
    assert out.count("machines that sample are rented when mine has its own") == 1
    mine, calls = workers().run_id, called(tmp_path)
    first = next(number for number, call in enumerate(calls) if f"launch -y -n {mine}" in call)
    assert len([call for call in calls[:first] if "queue" in call]) == 3


def test_no_worker_is_rented_for_a_run_that_ended_in_its_queue(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(fleet_launch, "LOOK_S", 0.01)
    stand_in(tmp_path, monkeypatch, "sky", queue_of("PENDING", "FAILED_NO_RESOURCE"))
    follows = [word for word in UP if word != "--detach"]
    code, out, _ = run(capsys, *follows, "--target", "skypilot-runpod", "--fleet", "1xL40S:spot")
    assert code == 1 and "FAILED_NO_RESOURCE" in out and run_record.workers_of("mine") == []


def test_no_worker_is_started_for_a_run_that_its_platform_refused(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sky", 'case "$*" in *launch*) exit 3 ;; esac')
    assert run(capsys, *UP, "--target", "skypilot-runpod", "--fleet", "2xL40S:spot")[0] == 3
    assert run_record.workers_of("mine") == []
    assert len([call for call in called(tmp_path) if "launch" in call]) == 1


def test_resume_starts_both_again_unless_the_workers_live(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "2xL40S:spot")
    assert run(capsys, "resume", "mine")[0] == 0
    assert len(run_record.workers_of("mine")) == 1, "as far as anybody knows they sample"
    replace(workers(), ended_s=time.time()).save()
    assert run(capsys, "resume", "mine")[0] == 0
    assert len(run_record.workers_of("mine")) == 2


def test_resume_on_a_desk_without_the_runs_secret_says_what_to_do(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "2xL40S:spot")
    key = run_record.RUNS / "mine/fleet.key"
    secret = key.read_text()
    key.unlink()
    before = called(tmp_path)
    code, _, err = run(capsys, "resume", "mine")
    assert code == 2 and "copy runs/mine/fleet.key" in err and f"export {KEY}" in err
    assert called(tmp_path) == before and not key.exists(), "no new one, and nothing is started"
    monkeypatch.setenv(KEY, secret)
    assert run(capsys, "resume", "mine")[0] == 0
    assert key.read_text() == secret


def test_resume_replaces_workers_of_which_nobody_tells_whether_they_live(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "scancel", "exit 1")
    stand_in(tmp_path, monkeypatch, "tail", "")
    run(capsys, *UP, "--target", "slurm", "--fleet", "2xL40S")
    before = workers()
    assert run(capsys, "resume", "mine")[0] == 0
    old, new = run_record.workers_of("mine")
    assert old.run_id == before.run_id and old.ended_s and not new.ended_s
    calls = called(tmp_path)
    assert len([call for call in calls if call.startswith("sbatch")]) == 4
    assert "scancel 77" in calls, "also where Slurm has it no more"


def test_slurm_and_pbs_get_an_array_and_a_log_for_each_machine(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "scancel", "")
    fleet = ["--fleet", "3xL40S"]
    assert run(capsys, *UP, "--target", "slurm", *fleet)[0] == 0
    mine = workers()
    assert mine.cluster == "77"
    first, second = [call for call in called(tmp_path) if call.startswith("sbatch")]
    assert first.endswith(f"{SEVEN}.sbatch") and second.endswith(f"{SEVEN}.sample.sbatch")
    assert f"--output=runs/{mine.run_id}/slurm.%a.log" in second
    driven = launch_commands(mine, [""], {}, [], False)
    assert [words[-1] for words in driven.logs] == [f"runs/{mine.run_id}/slurm.{i}.log" for i in range(3)]
    assert driven.down == [["scancel", "77"]], "the whole array"
    pbs = launch_commands(replace(mine, target="pbs"), ["a.pbs"], {}, [KEY], True)
    assert f"runs/{mine.run_id}/pbs.^array_index^.log" in pbs.up[0] and KEY not in " ".join(pbs.up[0])


def test_machines_of_another_target_than_the_runs(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "sky", "exit 0")
    fleet = ["--fleet", "2xL40S:spot@skypilot-runpod"]
    code, out, _ = run(capsys, *UP, "--target", "slurm", "--set", "site.partition=big", *fleet)
    assert code == 0 and "machines of your own" in out
    assert (run_record.load_record("mine").target, workers().target) == ("slurm", "skypilot-runpod")


def test_the_command_that_plan_names_starts_what_was_planned(capsys, tmp_path):
    _, said, _ = run(capsys, "plan", SEVEN, "--all", "--fleet", "--deadline", "4h")
    words = shlex.split(re.search(r"launch.py (up .*)", said)[1])
    code, out, err = run(capsys, *words, "--bucket", "s3://mine", "--run-id", "mine", "--dry-run")
    assert code == 0, err
    fleet = re.search(r"--fleet (\d+)x([\w-]+):\S+@(\S+)", said)
    assert re.search(rf"workers  mine-w\w+: {fleet[1]} x 1 {fleet[2]} on {fleet[3]}, \$", out)
    assert re.search(r"planned  .* h and \$\d+, .* with rollout.staleness=", out), "as the table said"


# --- machines that are started for a run that is there --------------------------------------------


def started(capsys, monkeypatch, tmp_path, *more):
    """A run with `fleet.workers=only` on Slurm, in a region and on spot machines of its own."""
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "sky", "exit 0")
    fleet = ("--set", "fleet.workers=only", "--set", "rollout.tensor_parallel=1")
    site = ("--set", "site.partition=big", "--set", "budget.max_restarts=7")
    assert run(capsys, *UP, "--target", "slurm", *fleet, *site, *more)[0] == 0
    (tmp_path / "calls").unlink()


def test_a_worker_takes_the_recipe_of_its_run_and_machines_of_its_own(capsys, monkeypatch, tmp_path):
    started(capsys, monkeypatch, tmp_path, "--set", "rollout.max_tokens=512")
    more = ["--target", "skypilot-runpod", "--set", "sample.nodes=2", "--set", "sample.spot=only", "--detach"]
    code, _, err = run(capsys, "up", "rollout-worker", "--set", "fleet.run=mine", *more)
    assert code == 0, err
    record = workers()
    view = resolve(record.recipe, record.overrides)
    assert (view.kind, view.jobs, view.cluster.gpu, view.cluster.spot) == ("sample", 2, "L40S", "only")
    assert view.config.rollout.max_tokens == 512 and view.config.checkpoint.max_restarts == 7
    assert view.site.partition == "", "the run's site is not that of another target"
    assert len([call for call in called(tmp_path) if "jobs launch" in call]) == 2
    assert "SPOTRL_LAUNCH" not in " ".join(called(tmp_path)), "the run's launch is not known here"
    capsys.readouterr()
    assert (
        run(capsys, "plan", "rollout-worker", "--set", "fleet.run=mine", "--target", "skypilot-runpod")[0]
        == 0
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "name it with --set fleet.run=RUN"),
        (["--set", "fleet.run=mine"], "no run mine was launched from here"),
    ],
)
def test_a_worker_without_a_run_is_refused(more, said, capsys):
    code, _, err = run(capsys, "up", "rollout-worker", "--target", "slurm", *more)
    assert code == 2 and said in err


def test_a_run_that_samples_by_itself_gets_no_workers(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    run(capsys, *UP, "--target", "slurm")
    code, _, err = run(capsys, "up", "rollout-worker", "--set", "fleet.run=mine", "--target", "slurm")
    assert code == 2 and "fleet.workers=only" in err


def test_a_worker_of_another_desk_needs_the_runs_secret(capsys, monkeypatch, tmp_path):
    started(capsys, monkeypatch, tmp_path)
    (run_record.RUNS / "mine/fleet.key").unlink()
    asked = ["up", "rollout-worker", "--set", "fleet.run=mine", "--target", "slurm", "--detach"]
    code, _, err = run(capsys, *asked)
    assert code == 2 and f"export {KEY}" in err and called(tmp_path) == []
    monkeypatch.setenv(KEY, "the secret of that run")
    assert run(capsys, *asked)[0] == 0
    assert not (run_record.RUNS / "mine/fleet.key").exists(), "the next one may be the right one"
    monkeypatch.setenv(KEY, "short")
    code, _, err = run(capsys, *asked)
    assert code == 2 and "has 5 characters" in err and "openssl rand -hex 32" in err


@pytest.mark.parametrize(("target", "program"), [("skypilot-runpod", "sky"), ("slurm", "sbatch")])
def test_several_workers_are_all_started_without_following_the_first(
    target, program, capsys, monkeypatch, tmp_path
):
    started(capsys, monkeypatch, tmp_path)
    asked = ["up", "rollout-worker", "--set", "fleet.run=mine", "--target", target]
    code, out, err = run(capsys, *asked, "--set", "sample.gpu=L40S", "--set", "sample.nodes=2")
    assert code == 0, err
    launches = [call for call in called(tmp_path) if call.startswith(program) and "queue" not in call]
    assert len(launches) == (2 if program == "sky" else 1)
    assert program != "sky" or all(" -d " in call for call in launches)
    assert "`python3 launch.py logs mine --worker 1` follows the first, 2 is the last" in out


def test_several_workers_of_which_one_was_refused_are_ended(capsys, monkeypatch, tmp_path):
    started(capsys, monkeypatch, tmp_path)
    stand_in(tmp_path, monkeypatch, "sky", 'case "$*" in *launch*-w????-2*) exit 3 ;; esac')
    asked = ["up", "rollout-worker", "--set", "fleet.run=mine", "--target", "skypilot-runpod"]
    code, out, _ = run(capsys, *asked, "--set", "sample.gpu=L40S", "--set", "sample.nodes=3")
    assert code == 3 and "could be started, so those that were are ended" in out
    assert [call for call in called(tmp_path) if re.search(r"(down|cancel) -y.*-w\w{4}-1$", call)]


def test_a_run_is_ended_though_its_workers_cannot_be(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "scancel", "")
    run(capsys, *UP, "--target", "slurm", "--fleet", "2xL40S")
    replace(workers(), target="local", desk="elsewhere").save()
    code, _, err = run(capsys, "down", "mine")
    assert code == 1 and "drive it there" in err
    assert run_record.load_record("mine").ended_s and "scancel 77" in called(tmp_path)


def test_down_leaves_workers_of_this_machine_that_ended_by_themselves(capsys, monkeypatch, tmp_path):
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 77")
    stand_in(tmp_path, monkeypatch, "scancel", "")
    run(capsys, *UP, "--target", "slurm", "--fleet", "2xL40S")
    replace(workers(), target="local").save()
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    (run_record.RUNS / workers().run_id / "local.pid").write_text(str(ended.pid))
    assert run(capsys, "down", "mine")[0] == 0
    assert not workers().ended_s, "nothing was asked of it"


# --- what a desk sees of them: states and logs ------------------------------------------------------


def test_logs_of_one_worker(capsys, monkeypatch, tmp_path):
    launched(capsys, monkeypatch, tmp_path, "3xL40S:spot")
    mine = workers()
    (tmp_path / "calls").unlink()
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert f"sky jobs logs -n {mine.run_id}-2" in called(tmp_path)
    replace(mine, managed=True, cluster="5").save()  # one command follows all
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert "sky jobs logs 5" in called(tmp_path)
    code, _, err = run(capsys, "logs", "mine", "--worker", "4")
    assert code == 2 and "3 machines were started from here for mine" in err


def test_workers_that_have_ended_are_told_one_by_one_and_their_logs_are_found(capsys, monkeypatch, tmp_path):
    """By a job's name SkyPilot finds the log of one that is running only."""
    launched(capsys, monkeypatch, tmp_path, "2xL40S:spot")
    mine = workers()
    rows = []
    for number, name in ((1, "mine"), (2, f"{mine.run_id}-1"), (3, f"{mine.run_id}-2")):
        rows.append({"job_id": number, "job_name": name, "status": "SUCCEEDED", "recovery_count": number - 1})
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    assert run(capsys, "logs", "mine", "--worker", "2")[0] == 0
    assert called(tmp_path)[-1] == "sky jobs logs 3"
    out = run(capsys, "status", "mine")[1]
    line = f"{mine.run_id}: worker 2: managed job 3: SUCCEEDED, no machine yet, recovered 2 times"
    assert line in out.splitlines() and "managed job 1: SUCCEEDED" in out


def test_the_state_of_several_jobs_is_told_together(monkeypatch, tmp_path):
    rows = []
    for number, status in ((1, "RUNNING"), (2, "RUNNING"), (3, "FAILED")):
        rows.append({"job_id": number, "job_name": f"w-{number}", "status": status, "recovery_count": 0})
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    record = run_record.RunRecord(
        run_id="w", recipe=SEVEN, target="skypilot-runpod", managed=True, jobs=3, samples_for="mine"
    )
    said = launched_run.ask_platform(record)
    assert said.state == "2 running, 1 failed" and not said.ended_s
    assert said.text.count("worker ") == 3
    for row in rows:
        row["status"] = "SUCCEEDED"
    stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps(rows)}'")
    said = launched_run.ask_platform(record)
    assert said.state == "finished" and said.ended_s


def test_status_names_the_workers_that_outlive_their_run(capsys, monkeypatch, tmp_path):
    """Their job may still look for a machine."""
    launched(capsys, monkeypatch, tmp_path, "1xL40S:spot")
    name = workers().run_id
    mine = {"job_id": 1, "job_name": "mine", "status": "SUCCEEDED", "recovery_count": 0}
    for status, left in (("STARTING", True), ("SUCCEEDED", False)):
        theirs = mine | {"job_id": 2, "job_name": f"{name}", "status": status}
        stand_in(tmp_path, monkeypatch, "sky", f"echo '{json.dumps([mine, theirs])}'")
        said = run(capsys, "status", "mine")[1]
        assert (f"mine has ended, and {name} may still rent machines" in said) == left, said
        assert ("`python3 launch.py down mine` ends them now" in said) == left
