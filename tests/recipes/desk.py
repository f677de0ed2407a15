"""The machine that runs are launched from: its run records, its tokens, its engines' programs."""

import os
import shlex
import sys

import pytest

import launch
from recipes.drivers import bucket_access, launch_checks, shared_record
from recipes.plan import keys
from recipes.platforms.script import SECRETS
from recipes.records import run_record


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs are recorded in a directory of the test's own, and no token of this machine is seen."""
    monkeypatch.setattr(run_record, "RUNS", tmp_path / "runs")
    for module in ("recipes.records.manifest", "recipes.drivers.status"):
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "RUNS", tmp_path / "runs")
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def run(capsys, line="", *more):
    """(exit code, output, errors) of `launch.py LINE MORE...`."""
    code = launch.main([*shlex.split(line), *more])
    out = capsys.readouterr()
    return code, out.out, out.err


def stand_in(tmp_path, monkeypatch, name, body):
    """A program of that name that writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def bucket(elsewhere, monkeypatch):
    """Amazon's keys, and a bucket that nobody asks."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stand-in")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stand-in")
    monkeypatch.setattr(bucket_access, "probe_bucket", lambda *a: None)
    monkeypatch.setattr(shared_record, "publish_manifest", lambda *a: None)
    monkeypatch.setattr(launch_checks, "earlier_launch", lambda *a: None)


def bare_desk(monkeypatch, folder):
    """Makes this machine one of a person who has just cloned: no program of a platform, key or catalog."""
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(keys, "LAUNCH_BIN", folder / "bin")
    for variable, _ in keys.KEYS.values():
        monkeypatch.delenv(variable or "NONE", raising=False)
