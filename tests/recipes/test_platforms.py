"""The contract of a platform: each target goes through render, obeys, commands, ask, end and reach."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from recipes.drivers import kubernetes_driver, launched_run, task_files
from recipes.platforms import base, options, programs, script
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers
from recipes.platforms.base import LaunchGiven
from recipes.platforms.targets import TARGETS
from recipes.presets import RECIPES, get, resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render
from tests.recipes.test_targets import PAIRS, VALUES, shell_of, with_hosts
from trainer import config as run_config
from trainer.config import ConfigError

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
HOSTS = "site.hosts=[user@n0]"
TOKEN = "TOP-SECRET"
FOLLOWERS = ("tail", "bash", "ssh")
"""Programs besides a platform's own that its commands may name."""


def launched(target, **fields):
    overrides = [HOSTS] if target in ("ssh", "dstack-ssh") else []
    return RunRecord(run_id="mine", recipe=SEVEN, target=target, overrides=overrides, **fields)


def given(detach=False):
    files = ["t.yaml", "t.volume.yaml", "t.fleet.yaml"]
    return LaunchGiven(files, {"RUN_ID": "mine"}, ["HF_TOKEN", script.FLEET_KEY], detach)


def kinds(target):
    """Records of a run, of one that a controller has, and of several machines that sample for one."""
    yield launched(target)
    yield launched(target, jobs=3, samples_for="other")
    if TARGETS[target].is_managed(get(SEVEN)):
        yield launched(target, managed=True)
        yield launched(target, managed=True, jobs=3, samples_for="other")


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


def test_every_option_is_obeyed_somewhere_and_no_platform_names_another():
    obeyed = set()
    wanted = ["storage.volume=v", "cluster.nodes=2", "site.container=pyxis", "site.region=US/US-KS-2"]
    for recipe in (get(SEVEN), resolve(SEVEN, wanted), get("serve")):
        for platform in TARGETS.values():
            assert platform.obeys(recipe) <= options.LIMITED, platform.name
            obeyed |= platform.obeys(recipe)
    assert obeyed == options.LIMITED


@pytest.mark.parametrize("target", TARGETS)
def test_commands_name_programs_that_there_are_and_no_secret(target, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    platform = TARGETS[target]
    for record in kinds(target):
        for detach in (False, True):
            commands = platform.commands(record, given(detach))
            assert commands.up and commands.logs and commands.down
            for argv in [*commands.up, *commands.status, *commands.logs, *commands.down]:
                assert TOKEN not in " ".join(argv)
                if argv[0] == sys.executable:
                    assert importlib.util.find_spec(argv[2]), argv
                else:
                    own = (platform.program, *getattr(platform, "asks", "").split()[:1])
                    assert argv[0] in (*own, getattr(platform, "cancels", ""), *FOLLOWERS), argv
    monkeypatch.setattr(programs, "find_program", lambda program: "")
    with pytest.raises(ConfigError, match=f"{platform.program} is not installed: {platform.hint[:20]}"):
        platform.check_program()


@pytest.mark.parametrize("target", TARGETS)
def test_a_platform_that_does_not_answer_says_nothing_and_one_without_the_run_says_so(target, monkeypatch):
    platform = TARGETS[target]
    monkeypatch.setattr(programs, "find_program", lambda program: "")
    empty = {"dstack": {"runs": []}, "kubectl": {"items": []}}.get(platform.program, [])
    for record in kinds(target):
        assert platform.ask(record, PlatformAnswers(price=lambda *_: 0.0)) is None
        monkeypatch.setattr(programs, "printed_json", lambda command: empty)
        answer = platform.ask(record, PlatformAnswers(price=lambda *_: 0.0))
        monkeypatch.undo()
        monkeypatch.setattr(programs, "find_program", lambda program: "")
        if platform.disposable:
            assert answer and not answer.known and "mine" in answer.text
        else:
            assert answer is None
        assert platform.is_open(record) == platform.disposable


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_ended_is_no_longer_open(target, monkeypatch, tmp_path):
    monkeypatch.setattr(run_record, "RUNS", tmp_path)
    for record in kinds(target):
        record.save()
        launched_run.note_end("mine")
        ended = run_record.load_record("mine")
        assert ended.ended_s and ended.state == ("gone" if TARGETS[target].is_cluster(record) else "stopped")
        assert not TARGETS[target].is_open(ended)


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_is_reached_or_it_is_said_why_not(target):
    platform = TARGETS[target]
    for record in kinds(target):
        where, attach = platform.server_address(record)
        assert where.startswith("http://") and (not attach or attach.startswith(" (`"))
        assert "is it running?" in platform.cure_of_silence(record)
        if record.managed:
            with pytest.raises(ConfigError, match="only its controller knows the machines"):
                platform.read_from_head(record, "file", dry_run=True)
        else:
            assert platform.read_from_head(record, "file", dry_run=True)[-1].rstrip('"').endswith("file")


def test_every_class_says_what_it_is():
    for platform in TARGETS.values():
        assert platform.program and platform.title and platform.hint and isinstance(platform, base.Platform)
        assert platform.gpus and "" in platform.network_gbit_s
    assert len(TARGETS) == 17 and set(RECIPES)


def test_a_private_registry_gets_its_login_or_the_platform_is_refused_by_name():
    """And a name of dstack's server is looked for before anything is rented (`check`)."""
    recipe = resolve(SEVEN, ["site.image_secret=mine"])
    login = [{"name": "mine"}]
    sets = yaml.safe_load(next(iter(render(recipe, "kubernetes").values())))
    pod = sets["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    sky = yaml.safe_load(next(iter(render(recipe, "skypilot-kubernetes").values())))
    assert (
        pod["imagePullSecrets"]
        == sky["config"]["kubernetes"]["pod_config"]["spec"]["imagePullSecrets"]
        == login
    )
    text = next(iter(render(recipe, "dstack-gcp").values()))
    names = {"username": "${{ secrets.mine_username }}", "password": "${{ secrets.mine_password }}"}
    assert yaml.safe_load(text)["registry_auth"] == names and "dstack secret set mine_password" in text
    for target in ("skypilot-gcp", "slurm"):
        with pytest.raises(ConfigError, match="site.image_secret is mine, and .* does nothing with it"):
            render(recipe, target)


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
    monkeypatch.setattr(kubernetes_driver.platform_state, "ask_platform", ask)
    monkeypatch.setattr(kubernetes_driver, "start", lambda record: None)
    monkeypatch.setattr(kubernetes_driver, "head_pods", lambda record: [])
    monkeypatch.setattr(kubernetes_driver, "run_kubectl", removed.append)
    monkeypatch.setattr(run_record, "load_record", lambda run_id: record)
    limit = [f"placement.start_timeout_s={limit_s}"]
    record = RunRecord(run_id="mine", recipe=SEVEN, target="kubernetes", overrides=limit)
    assert kubernetes_driver.main("start" if detached else "up", "mine") == code
    assert left == answers[-1:] and bool(removed) == (code == 2)
    printed = capsys.readouterr().out
    assert not removed or ("delete" in removed[0] and "mine" in removed[0] and f"error: {WHY}" in printed)
