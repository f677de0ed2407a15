"""The contract of a platform: each target goes through render, obeys, commands, ask, end and reach; what it
cannot run or obey is refused with the targets that can."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache

import pytest
import yaml

from recipes.drivers import desk_driver, kubernetes_driver, launched_run, task_files
from recipes.platforms import programs, script, ssh, targets
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers
from recipes.platforms.base import LaunchGiven
from recipes.platforms.targets import TARGETS, refusal
from recipes.presets import RECIPES, get, resolve
from recipes.recipe.spec import Site, override
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render
from tests.recipes.test_targets import PAIRS, VALUES, shell_of, with_hosts
from trainer import config as run_config
from trainer.config import ConfigError

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
BIG = "grpo-qwen2.5-vl-72b-mathv60k"
TOKEN = "TOP-SECRET"
FOLLOWERS = ("tail", "bash", "ssh")
"""Programs besides a platform's own that its commands may name."""


def kinds(target):
    """Records of a run, of one that a controller has, and of several machines that sample for one."""
    for managed in (False, True) if TARGETS[target].is_managed(get(SEVEN)) else (False,):
        for several in ({}, {"jobs": 3, "samples_for": "other"}):
            overrides = ["site.hosts=[user@n0]"] if target in ("ssh", "dstack-ssh") else []
            yield RunRecord(
                run_id="mine", recipe=SEVEN, target=target, overrides=overrides, managed=managed, **several
            )


def test_every_file_is_valid_shell_with_the_whole_configuration():
    """Shells that differ in names and numbers alone are parsed once."""
    shells = {}
    for name, target in PAIRS:
        recipe = with_hosts(name, target)
        run = task_files.resolve_task(recipe, target)
        files = task_files.render(run)
        assert files == task_files.render(run), f"{name} on {target}"
        shell = shell_of(next(iter(files.values())))
        inside = re.search(r"<<YAML\n(.*?)^YAML$", shell, re.S | re.M)
        assert inside, f"{name} on {target}"
        values = yaml.safe_load(script.fill_placeholders(inside[1], VALUES))
        resolved = run_config.from_dict(run_config.RunConfig, values)
        assert resolved.run_id == "r" and resolved.placement == recipe.config.placement
        if recipe.kind == "train":
            run_config.validate(resolved)
            assert resolved.checkpoint.remote == "s3://mine"
        shells[re.sub(r"\b(grpo|sft|opd)-[\w.-]+|(?<={DATA}/)[\w-]+|\d+", "x", shell)] = (name, target, shell)
    assert len(shells) < len(PAIRS)
    for name, target, shell in shells.values():
        done = subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True)
        assert done.stderr == "", f"{name} on {target}"


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_driven_asked_ended_and_reached(target, monkeypatch, tmp_path):
    monkeypatch.setattr(run_record, "RUNS", tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(programs, "find_program", lambda program: "")
    platform = TARGETS[target]
    with pytest.raises(ConfigError, match=f"{platform.program} is not installed: {platform.hint[:20]}"):
        platform.check_program()
    files = ["t.yaml", "t.volume.yaml", "t.fleet.yaml"]
    for record in kinds(target):
        for detach in (False, True):
            given = LaunchGiven(files, {"RUN_ID": "mine"}, ["HF_TOKEN", script.FLEET_KEY], detach)
            commands = platform.commands(record, given)
            assert commands.up and commands.logs and commands.down
            for argv in [*commands.up, *commands.status, *commands.logs, *commands.down]:
                assert TOKEN not in " ".join(argv)
                if argv[0] == sys.executable:
                    assert hasattr(importlib.import_module(f"recipes.drivers.{target}_driver"), argv[3])
                else:
                    own = (platform.program, *getattr(platform, "asks", "").split()[:1])
                    assert argv[0] in (*own, getattr(platform, "cancels", ""), *FOLLOWERS), argv

        assert platform.ask(record, PlatformAnswers(price=lambda *_: 0.0)) is None, "it does not answer"
        empty = {"dstack": {"runs": []}, "kubectl": {"items": []}}.get(platform.program, [])
        with monkeypatch.context() as answering:
            answering.setattr(programs, "printed_json", lambda command, empty=empty: empty)
            answer = platform.ask(record, PlatformAnswers(price=lambda *_: 0.0))
        if platform.disposable:
            assert answer and not answer.known and "mine" in answer.text
        else:
            assert answer is None
        assert platform.is_open(record) == platform.disposable

        where, attach = platform.server_address(record)
        assert where.startswith("http://") and (not attach or attach.startswith(" (`"))
        assert "is it running?" in platform.cure_of_silence(record)
        if record.managed:
            with pytest.raises(ConfigError, match="only its controller knows the machines"):
                platform.read_from_head(record, "file", dry_run=True)
        else:
            assert platform.read_from_head(record, "file", dry_run=True)[-1].rstrip('"').endswith("file")

        record.save()
        launched_run.note_end("mine")
        ended = run_record.load_record("mine")
        assert ended.ended_s and ended.state == ("gone" if platform.is_cluster(record) else "stopped")
        assert not platform.is_open(ended)


# --- Refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "overrides", "message"),
    [
        (BIG, "skypilot-runpod", [], "runs one node.*wants 4: use dstack-runpod"),
        (SEVEN, "dstack-runpod", ["cluster.spot=only"], "use skypilot-runpod"),
        (BIG, "dstack-runpod", ["cluster.nodes=16", "algorithm.samples_per_update=0"], "at most 8 nodes"),
        (BIG, "slurm", ["cluster.spot=only"], "no spot nodes.*use skypilot-gcp"),
        (BIG, "dstack-runpod", ["cluster.spot=only"], "use skypilot-gcp or dstack-gcp"),
        (SEVEN, "skypilot-gcp", ["cluster.gpu=MI300X", "cluster.alternatives=[]"], "has no MI300X"),
        (SEVEN, "skypilot-runpod", ["cluster.gpu=MI300X", "cluster.alternatives=[]"],
         "set cluster.image to one with PyTorch and vLLM for ROCm"),
        (SEVEN, "skypilot-gcp",
         ["cluster.gpus_per_node=3", "rollout.tensor_parallel=1", "rollout.prompts_per_step=63"],
         "with 3 per node"),
        (SEVEN, "skypilot", ["cluster.gpu=L40S", "cluster.alternatives=[]", "site.clouds=[gcp,azure]"],
         "skypilot-gcp has no L40S.*; skypilot-azure has no L40S"),
        (SEVEN, "skypilot", ["cluster.gpu=GH200"], "GH200 has an ARM processor"),
        ("demo", "dstack-runpod", [], "rents machines with GPUs"),
        ("demo", "skypilot-azur", [], "unknown target skypilot-azur: did you mean skypilot-azure"),
        (SEVEN, "skypilot-runpod", ["storage.volume=v"], "set site.region"),
        (SEVEN, "skypilot-gcp", ["site.image_secret=m"], "site.image_secret is m, and .* does nothing"),
    ],
)  # fmt: skip
def test_refused_with_the_target_that_can(name, target, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        render(override(get(name), overrides), target)
    assert "\n" not in str(caught.value)


def test_what_is_offered_instead_can_run_it():
    for name in RECIPES:
        for target in TARGETS:
            try:
                targets.check_target(get(name), target)
            except ConfigError as error:
                for other in re.findall(r"(?:use|or) ((?:skypilot|dstack)-\w+|slurm|pbs|ssh)", str(error)):
                    assert not refusal(get(name), other), f"{name} on {target}: {error}"


@pytest.mark.parametrize(
    ("card", "more", "infra"),
    [
        ("L40S", ["site.clouds=[gcp,runpod]"], "runpod"),
        ("L40S", ["site.clouds=[nebius]", "cluster.gpus_per_node=4"], "nebius"),
        ("MI300X", ["cluster.image=rocm/vllm:1"], "runpod"),
    ],
)
def test_a_chooser_takes_cards_of_any_of_its_clouds(card, more, infra):
    given = [f"cluster.gpu={card}", "cluster.alternatives=[]", "cluster.nodes=1", *more]
    task = yaml.safe_load(next(iter(render(resolve("preflight", given), "skypilot").values())))
    places = task["resources"].get("ordered", [task["resources"]])
    assert {place["infra"] for place in places} == {infra} and card in str(places[0]["accelerators"])


# --- Options -------------------------------------------------------------------------------------------

BESIDE = {
    "site.storage_class": ("storage.volume=v",),
    "storage.volume_gib": ("storage.volume=v",),
    "site.topology": ("cluster.nodes=2",),
}
"""What an option needs beside it."""
GIVEN = {
    "cluster.nodes": "2",
    "cluster.gpus_per_node": "4",
    "cluster.gpu": "B200",
    "cluster.alternatives": "[B200]",
    "cluster.spot": "only",
    "cluster.image": "own/image:1",
    "site.region": "US/US-KS-2",
    "site.clouds": "[aws]",
    "site.gpu_label": "a.b/card=h100",
    "site.rdma": "rdma/ib:8",
    "site.hosts": "[u@other]",
    "site.walltime_hours": "6",
    "site.prelude": "[module load cuda]",
    "site.offline": "true",
    "site.container": "pyxis",
    "site.pbs": "torque",
    "storage.bucket": "s3://mine/runs",
    "storage.weights": "s3://mine/run/checkpoints/hf",
}
"""A value other than the default; of those that are not named a word or a number."""
PLANNED = ("cluster.gpu", "cluster.alternatives", "cluster.gpus_per_node", "cluster.spot")
"""What machines of a person's own, or a cloud without a spot market, are: the plan and the refusals of shapes
read it, and no file does."""
KINDS = (
    "local", "ssh", "slurm", "pbs", "skypilot", "skypilot-gcp", "skypilot-kubernetes", "dstack-runpod",
    "dstack-ssh", "kubernetes",
)  # fmt: skip
"""One target of each kind."""
OPTIONS = [f"{name}.{field.name}" for name, kind in targets.SECTIONS.items() for field in fields(kind)]


def value_of(option: str) -> str:
    section, _, name = option.partition(".")
    if option in GIVEN:
        return GIVEN[option]
    if isinstance(getattr(targets.SECTIONS[section](), name), str):
        return "word"
    return "7" if section == "budget" else "7777"


@cache
def made(target: str, overrides: tuple[str, ...]) -> dict[str, str]:
    """All that the target is told: its files, and the command that starts a node over ssh."""
    hosts = [] if any(one.startswith("site.hosts") for one in overrides) else ["site.hosts=[u@h0]"]
    if "cluster.nodes=2" in overrides:
        hosts = ["site.hosts=[u@h0,u@h1]"]
    recipe = resolve(SEVEN, [*overrides, *(hosts if target in ("ssh", "dstack-ssh") else [])])
    files = render(recipe, target)
    if target == "ssh":
        files = files | {"command": "\n".join(ssh.run_command(recipe, 0, {}, "run"))}
    return files


@pytest.mark.parametrize(
    "names", [KINDS, pytest.param(TARGETS, marks=pytest.mark.long)], ids=["kinds", "all"]
)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_has_an_effect_or_is_refused(option, names):
    for target in names:
        beside = BESIDE.get(option, ())
        if "cluster.nodes=2" in (*beside, f"{option}=2") and TARGETS[target].max_nodes == 1:
            continue  # refused as a shape
        try:
            files = made(target, (*beside, f"{option}={value_of(option)}"))
        except ConfigError as error:
            text = str(error)
            known = any(re.search(rf"\b{other}\b", text) for other in TARGETS if other != target)
            assert known or "leave it out" in text or "set site.region" in text, text
            continue
        assert option in PLANNED or files != made(target, beside), f"{option} does nothing on {target}"


def test_every_option_is_obeyed_somewhere_and_hours_are_the_runs_own_everywhere():
    obeyed = set()
    wanted = ["storage.volume=v", "cluster.nodes=2", "site.container=pyxis", "site.region=US/US-KS-2"]
    for recipe in (get(SEVEN), resolve(SEVEN, wanted), get("serve")):
        for platform in TARGETS.values():
            assert platform.obeys(recipe) <= targets.LIMITED, platform.name
            obeyed |= platform.obeys(recipe)
    assert obeyed == targets.LIMITED
    for target in TARGETS:
        files = made(target, ("budget.max_hours=7",))
        assert any("max_hours: 7" in text for text in files.values()), target


@pytest.mark.parametrize(
    ("target", "option", "able"),
    [
        ("ssh", "budget.max_hourly_usd=9", "skypilot-runpod"),
        ("slurm", "cluster.image=own/image:1", "skypilot-runpod"),
        ("skypilot-gcp", "site.container=pyxis", "slurm"),
        ("skypilot-gcp", "site.grace_s=60", "slurm"),
        ("dstack-gcp", "site.namespace=me", "kubernetes"),
        ("kubernetes", "budget.keep_minutes=9", "skypilot-lambda"),
        ("kubernetes", "site.clouds=[aws]", "skypilot"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_with_a_target_that_obeys_it(target, option, able):
    with pytest.raises(ConfigError, match="does nothing with it: leave it out, or use") as error:
        render(resolve(SEVEN, [option]), target)
    assert able in str(error.value)


def test_options_of_the_second_group_are_checked_against_its_target():
    base = ["sample.nodes=2", "fleet.workers=only", "sample.target=skypilot-gcp", "sample.gpu=L4"]
    base += ["site.partition=gpu", "site.region=us-central1"]  # each is obeyed by one of the two
    render(resolve(SEVEN, base), "slurm")
    for option, value in (("constraint", "x"), ("shm_gib", "9")):
        with pytest.raises(ConfigError, match=f"sample.{option} is {value}, and skypilot-gcp does nothing"):
            render(resolve(SEVEN, [*base, f"sample.{option}={value}"]), "slurm")


@pytest.mark.parametrize(
    ("target", "there"),
    [("skypilot-gcp", "slurm"), ("skypilot-gcp", "kubernetes"), ("kubernetes", "skypilot-runpod")],
)
def test_an_option_of_the_site_has_an_effect_on_one_of_two_targets_or_is_refused(target, there):
    """As `--fleet 2xL4@OTHER` asks for it."""
    base = ["sample.nodes=2", "fleet.workers=only", f"sample.target={there}", "sample.gpu=L4"]
    before = render(resolve(SEVEN, base), target)
    refused = []
    for field in fields(Site):
        option = f"site.{field.name}"
        try:
            after = render(resolve(SEVEN, [*base, f"{option}={value_of(option)}"]), target)
        except ConfigError as error:
            refused.append(option)
            of_group = field.name in targets.OF_GROUP
            assert (f"machines that sample have sample.{field.name}" in str(error)) == of_group
            continue
        assert after != before, f"{option} does nothing on {target} and {there}"
    assert 0 < len(refused) < len(fields(Site)) - 5


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_preset_asks_for_itself_is_not_refused(name):
    for target in TARGETS:
        targets.check_options(RECIPES[name](), target)


# --- Images --------------------------------------------------------------------------------------------


def test_a_private_registry_gets_its_login():
    recipe = resolve(SEVEN, ["site.image_secret=mine"])
    sets = yaml.safe_load(next(iter(render(recipe, "kubernetes").values())))
    pod = sets["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    sky = yaml.safe_load(next(iter(render(recipe, "skypilot-kubernetes").values())))
    for spec in (pod, sky["config"]["kubernetes"]["pod_config"]["spec"]):
        assert spec["imagePullSecrets"] == [{"name": "mine"}]
    text = next(iter(render(recipe, "dstack-gcp").values()))
    names = {"username": "${{ secrets.mine_username }}", "password": "${{ secrets.mine_password }}"}
    assert yaml.safe_load(text)["registry_auth"] == names and "dstack secret set mine_password" in text


WHY = "ImagePullBackOff: Back-off pulling image"
STARTING = PlatformAnswer(text="starting", state="starting")
NO_IMAGE = PlatformAnswer(text=f"starting; {WHY}", state="starting", why=WHY)
QUEUED = PlatformAnswer(text="starting; no machine", state="queued")
RUNNING = PlatformAnswer(text="running", state="running")
FAILED = PlatformAnswer(text="Failed", state="failed", why="exit code 2", ended_s=1.0)


@pytest.mark.parametrize(
    ("detached", "limit_s", "answers", "code"),
    [
        (False, 0.1, [NO_IMAGE], 2),
        (True, 0.1, [STARTING, NO_IMAGE], 2),
        (True, 60, [None, STARTING, NO_IMAGE, STARTING, RUNNING], 0),
        (True, 60, [STARTING, QUEUED], 0),
        (True, 60, [STARTING, FAILED], 1),
        (True, 0.1, [STARTING], 0),
        (True, 0.1, [None], 0),
    ],
)
def test_pods_that_cannot_pull_their_image_are_ended_after_the_starts_limit(
    monkeypatch, capsys, detached, limit_s, answers, code
):
    """A detached start looks that long, too: until all pods have their image, or wait for machines."""
    left, removed = list(answers), []

    def ask(record):
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(kubernetes_driver, "POLL_S", 0.05)
    monkeypatch.setattr(kubernetes_driver.launched_run, "ask_platform", ask)
    monkeypatch.setattr(kubernetes_driver, "create", lambda record: None)
    monkeypatch.setattr(kubernetes_driver, "head_pods", lambda record: [])
    monkeypatch.setattr(kubernetes_driver, "run_kubectl", removed.append)
    monkeypatch.setattr(run_record, "load_record", lambda run_id: record)
    limit = [f"placement.start_timeout_s={limit_s}"]
    record = RunRecord(run_id="mine", recipe=SEVEN, target="kubernetes", overrides=limit)
    assert desk_driver.main("start" if detached else "up", "mine") == code
    assert left == answers[-1:] and bool(removed) == (code == 2)
    printed = capsys.readouterr().out
    assert not removed or ("delete" in removed[0] and "mine" in removed[0] and f"error: {WHY}" in printed)
