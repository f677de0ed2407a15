"""Every command of README and docs: run as far as a dry run goes, or taken by the engine's own parser."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.commands import cli
from recipes.commands.main_commands import launch
from recipes.platforms.script import SECRETS
from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get, resolve
from recipes.records import run_record
from tests.recipes.rendered import launch_commands, render

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("tests/lab/*.md"))]
PROGRAMS = ("launch.py", "sky", "dstack", "sbatch", "qsub")
STARTS = ("up", "demo", "preflight", "serve", "evaluate")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def commands(text):
    """(argument vector, refusal) of every command in fenced or indented blocks; the refusal is shown below
    it."""
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.M | re.S) + re.findall(
        r"(?:^ {4}.*\n?)+", text, re.M
    )
    for block in blocks:
        lines = block.replace("\\\n", " ").splitlines()
        for i, line in enumerate(lines):
            below = lines[i + 1].strip() if i + 1 < len(lines) else ""
            for part in line.strip().removeprefix("$ ").split(" && "):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:
                    continue
                while words and (
                    ASSIGNMENT.fullmatch(words[0]) or words[0] in ("uv", "run", "python", "python3", "export")
                ):
                    words.pop(0)
                if words and words[0] in PROGRAMS:
                    yield words, below if below.startswith("launch.py: ") else ""


FOUND = [(page.name, *found) for page in PAGES for found in commands(page.read_text())]
OURS = [found for found in FOUND if found[1][0] == "launch.py"]
THEIRS = [found for found in FOUND if found[1][0] != "launch.py"]


def test_commands_are_found():
    known = {"demo", "plan", "render", "up", "preflight", "status", "down", "resume"}
    assert {words[1] for _, words, _ in OURS} >= known
    assert {words[0] for _, words, _ in THEIRS} == {"sky", "dstack", "sbatch", "qsub"}


@pytest.mark.parametrize(
    ("page", "words", "refusal"), OURS, ids=[f"{p}: {shlex.join(w)}" for p, w, _ in OURS]
)
def test_our_command_is_taken_and_its_dry_run_ends_well(page, words, refusal, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run_record, "RUNS", tmp_path / "runs")
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = [word.replace(":PORT", ":2201") for word in words[1:]]
    arguments = ["my-run" if word == "RUN" else word for word in arguments]
    if arguments[0] in ("data", "test"):
        return
    if "..." in arguments[-1]:  # hosts that the page leaves to the reader
        arguments[-1] = arguments[-1].replace("...", "root@203.0.113.9/10.65.0.4,root@203.0.113.10/10.65.0.5")
    if "own.jsonl" in arguments:  # the reader's
        (tmp_path / "own.jsonl").write_text('{"q": "1 + 1?", "gold": "2", "level": "easy"}\n')
        arguments = [str(tmp_path / word) if word == "own.jsonl" else word for word in arguments]
    command = arguments[0]
    given = launch.commands[command].make_context(command, arguments[1:]).params
    if command not in ("list", "plan", "render", *STARTS):
        return
    seven = run_record.RunRecord(
        run_id="my-run", recipe="grpo-qwen2.5-vl-7b-mathv60k", target="skypilot-runpod"
    )
    own = ["storage.bucket=s3://mine"]
    if "rollout-worker" in arguments:
        own += ["fleet.workers=only", "rollout.tensor_parallel=1"]
    replace(seven, bucket="s3://mine", overrides=own).save()  # what pages call yours
    if command in ("serve", "evaluate") or "rollout-worker" in arguments:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stand-in")
    bucket = given.get("bucket", "")
    if bucket.startswith("s3://"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stand-in")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stand-in")
    if command in STARTS and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    code = cli.main(arguments)
    said = capsys.readouterr()
    if refusal:
        plain = re.sub(r"[\d.]+", "0", said.err)  # figures may move
        parts = [
            re.sub(r"[\d.]+", "0", part).strip() for part in refusal.removeprefix("launch.py: ").split("...")
        ]
        assert code == 2 and all(part in plain for part in parts), said.err
    else:
        assert code == 0, said.err


def test_preflight_of_every_target_needs_neither_bucket_nor_keys(monkeypatch, tmp_path, capsys):
    from recipes.platforms.targets import TARGETS

    monkeypatch.setattr(run_record, "RUNS", tmp_path / "runs")
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for target in TARGETS:
        given = ["preflight", "--target", target, "--dry-run"]
        if target in ("ssh", "dstack-ssh"):
            given += ["--hosts", "a,b"]
        elif target in ("local", "skypilot-runpod"):
            given += ["--set", "cluster.nodes=1"]
        assert cli.main(given) == 0, (target, capsys.readouterr().err)
        shown = capsys.readouterr().out
        assert "BUCKET:?" not in shown and "secrets." not in shown and "\n- BUCKET" not in shown, target


CHECK = """
import argparse, json, sys
class Taken(Exception): pass
def sky(words):
    from sky.client.cli import command
    cmd, args, parent = command.cli, words[1:], None
    while True:
        ctx = cmd.make_context(words[0], list(args), parent=parent)
        if not hasattr(cmd, "resolve_command"):
            return
        _, cmd, args = cmd.resolve_command(ctx, [*ctx.protected_args, *ctx.args])
        parent = ctx
def dstack(words):
    from dstack._internal.cli import main
    parse = argparse.ArgumentParser.parse_known_args
    def stop(self, *given, **more):
        args, left = parse(self, *given, **more)
        if type(self).__name__ and self.prog == "dstack":
            if left:
                from dstack._internal.cli.services.configurators import get_apply_configurator_class
                from dstack._internal.core.models.configurations import ApplyConfigurationType
                _, left = parse(get_apply_configurator_class(ApplyConfigurationType.TASK).get_parser(), left)
            if left: raise SystemExit(f"unknown arguments {left}")
            raise Taken
        return args, left
    argparse.ArgumentParser.parse_known_args = stop
    sys.argv = words
    try:
        main.main()
    except Taken:
        return
    finally:
        argparse.ArgumentParser.parse_known_args = parse
    raise AssertionError("not parsed")
out = {}
for words in json.load(sys.stdin):
    try:
        {"sky": sky, "dstack": dstack}[words[0]](words)
    except BaseException as error:
        out[" ".join(words)] = repr(error)
print(json.dumps(out))
"""


def commands_of_head(text):
    """Argument vectors of the commands in the comment that a rendered file begins with."""
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    block = "".join(f"    {line}\n" for line in lines)
    return [words for words, _ in commands(block)]


@pytest.mark.skipif(not LAUNCH.exists(), reason="no .venvs/launch: bash trainer/shell/setup.sh launch")
def test_platforms_take_every_command_of_docs_rendered_files_and_drivers():
    taken = [words for _, words, _ in THEIRS if words[0] in ("sky", "dstack")]
    for name in RECIPES:
        for target in targets_for(get(name)):
            if target.startswith(("skypilot", "dstack")) and target != "dstack-ssh":
                taken += commands_of_head(next(iter(render(get(name), target).values())))
    for target in ("skypilot-runpod", "skypilot-gcp", "dstack-runpod"):
        for managed in (True, False):
            flags = (
                ["--max-offers", "3", "--gpu", "H100:8"] if target == "dstack-runpod" else ["--cpus", "64+"]
            )
            name = "r" if managed else "serve"
            record = run_record.RunRecord(
                run_id="r", recipe=name, target=target, managed=managed, flags=flags
            )
            files, env = ["t.yaml", "t.fleet.yaml", "t.volume.yaml"], {"RUN_ID": "r", "SPOTRL_LAUNCH": "x"}
            secrets = ["HF_TOKEN", "VLLM_API_KEY", "SPOTRL_FLEET_KEY"]
            for one in (record, replace(record, jobs=3)):  # a run, machines that sample for one
                driven = launch_commands(one, files, env, secrets, True)
                taken += [*driven.up, *driven.status, *driven.logs, *driven.down]
    assert len(taken) > 200
    # recipes' commands differ in the file's name alone
    alike = {re.sub(r"(?<=/)[\w.-]+?(?=(\.\w+)?\.yaml)", "", " ".join(words)): words for words in taken}
    keys = ("HF_TOKEN", "VLLM_API_KEY", "SPOTRL_FLEET_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"} | dict.fromkeys(keys, "x")
    done = subprocess.run(
        [LAUNCH, "-c", CHECK],
        input=json.dumps(list(alike.values())),
        text=True,
        capture_output=True,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {}


def test_files_that_commands_name_are_there():
    for page, words, _ in FOUND:
        for word in words[1:]:
            if word.startswith("recipes/generated/"):
                assert (ROOT / word).is_file(), f"{page}: {word}"


def test_inline_commands_name_commands_and_options_that_exist():
    known = launch.commands
    for page in PAGES:
        for inline in re.findall(r"`(?:uv run )?(?:python3? )?launch\.py ([a-z]+)([^`]*)`", page.read_text()):
            assert inline[0] in known, f"{page.name}: launch.py {inline[0]}"
            options = set(re.findall(r"(--[a-z-]+)", inline[1]))
            if inline[0] not in ("data", "test"):
                taken = {name for one in known[inline[0]].params for name in one.opts}
                assert options <= taken | {"--help"}, f"{page.name}: {inline}"
            for name in re.findall(r"\b(grpo-\S+)", inline[1]):
                assert name in RECIPES, f"{page.name}: {name}"


def test_the_figures_of_the_72b_page_are_those_of_the_plan():
    from recipes.plan import cost, memory

    page, recipe = (ROOT / "docs/quickstart.md").read_text(), resolve("grpo-qwen2.5-vl-72b-mathv60k", [])
    need = memory.plan_memory(recipe)
    assert need is not None
    peak, ram, disk = (n / 2**30 for n in (need.peak.total, need.host_bytes, need.disk_bytes))
    for figure in (f"{peak:.1f} of 79.2 GiB", f"host RAM ({ram:.0f} GiB", f"disk ({disk:.0f} GiB"):
        assert figure in page
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (spot|on demand) \| (.+) \|$", page, re.M)
    assert len(rows) == 4
    offers = {(o.target, o.gpu, o.spot): o for o in cost.offers(recipe)}  # at the snapshot's prices
    for target, gpu, market, figures in rows:
        offer = offers[target, gpu, market == "spot"]
        shown = f"{offer.usd_per_hour:.2f} | {offer.step.total:.0f} | {offer.hours:.1f} | {offer.usd:.0f}"
        assert figures == shown, (target, gpu)
