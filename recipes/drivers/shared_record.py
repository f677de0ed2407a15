"""A run's launch in its bucket, so that another desk can drive the run: BUCKET/RUN/manifest.json.

`up` puts the manifest's first half there, with the record of the launch in it; `adopt_run` makes the record
of this desk from it. It holds no token, and no change of the tree that the run was launched from.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipes.drivers import bucket_access, desk_python, run_view, tokens
from recipes.recipe import recipe_files
from recipes.recipe.recipe_files import is_python
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.run_folder import MANIFEST, write_whole
from trainer.config.run_store import RunStore
from trainer.system.exit_codes import EXIT_STORAGE

ANSWER_S = 10.0
"""That a store has for a small file."""
ADOPTED = "adopted"
"""Folder of an adopted run's record that holds what came with it: the Python file of its recipe."""


def publish_manifest(record: RunRecord, env: dict[str, str]) -> None:
    """Puts the manifest of a launch into its bucket. A bucket that cannot be written is said, and no more:
    the run goes on without it."""
    if not record.bucket or not bucket_access.can_open(record.bucket, env):
        return
    data = json.loads((run_record.RUNS / record.run_id / MANIFEST).read_text())
    # Files that git does not know may hold anything: they stay on this machine.
    changed = data["launch"]["diff"] or data["launch"]["untracked"]
    data["launch"] |= {"diff": None if changed else "", "untracked": {}, "untracked_diff": ""}
    data["launch"]["record"] = asdict(replace(record, desk=record.desk or socket.gethostname()))
    if is_python(record.recipe):
        data["launch"]["recipe_file"] = Path(record.recipe.rpartition(":")[0]).read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MANIFEST
        path.write_text(f"{json.dumps(data, indent=1)}\n")
        store = RunStore.in_bucket(record.bucket, record.run_id)
        done = _storage("cp", str(path), store.root, env=env)
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()[-1]
        print(f"warning: no other desk can drive {record.run_id}: {said}", file=sys.stderr, flush=True)


def known_or_adopted(run: str, bucket: str = "") -> None:
    """Makes sure that this desk has a record of a run. Raises ConfigError where its bucket has none, or
    none is named."""
    if run_record.is_known(run):
        return
    where = bucket or run_view.remembered_buckets().get(run, "")
    if not where:
        run_record.load_record(run)  # says which runs are known
    adopt_run(run, where)


def adopt_run(run: str, bucket: str) -> RunRecord:
    """The record of a run that was launched elsewhere, from its bucket's manifest. Raises ConfigError."""
    run_record.check_run_id(run)
    folder = run_record.RUNS / run
    store = RunStore.in_bucket(bucket, run)
    done = _storage("cat", store.root, MANIFEST, env=tokens.find_tokens() | tokens.find_settings())
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()[-1]
        raise ConfigError(f"no launch of {run} in {store.bucket} ({said.removeprefix('error: ')})")
    (folder / ADOPTED).mkdir(parents=True, exist_ok=True)
    write_whole(folder / MANIFEST, done.stdout.encode())
    record = _record(run, json.loads(done.stdout), folder / ADOPTED)
    record = replace(record, bucket=store.bucket)
    record.save()
    print(f"adopted {run}, launched on {record.desk} for {record.target}", file=sys.stderr, flush=True)
    return record


def _record(run: str, data: dict[str, Any], kept: Path) -> RunRecord:
    told = data.get("launch", {})
    if "record" not in told:
        raise ConfigError(f"the manifest of {run} has no record of its launch: an earlier version wrote it")
    known = {key: value for key, value in told["record"].items() if key in RunRecord.__dataclass_fields__}
    record = RunRecord(**known)
    if "recipe_file" in told:
        name, _, function = record.recipe.rpartition(":")
        file = kept.absolute() / Path(name).name
        file.write_text(told["recipe_file"])
        record = replace(record, recipe=f"{file}:{function}")
    return record


def fetched_shape(store: str, folder: Path, key: str) -> str:
    """The absolute path of `folder` with the config.json of a model in a bucket; "" where it has none."""
    done = _storage("cat", store, "config.json", env=tokens.find_tokens() | tokens.find_settings())
    if done.returncode:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", done.stdout.encode())
    (folder / recipe_files.STORED_NOTE).write_text(key)
    return str(folder.absolute())


def _storage(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command of the store, which has failed where it does not answer in time: no launch waits for it."""
    argv = [desk_python.find_python(), "-m", "trainer.storage", *words]
    try:
        return subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        said = f"the bucket has not answered in {ANSWER_S:g} s"
        return subprocess.CompletedProcess(argv, EXIT_STORAGE, "", said)
