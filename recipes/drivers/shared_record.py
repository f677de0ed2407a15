"""A run's launch in its bucket, so that another desk can drive the run: BUCKET/RUN/manifest.json.

`up` puts the manifest's first half there, with the record of the launch in it; `adopt_run` makes the record
of this desk from it. It holds no token, and no change of the tree that the run was launched from.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from recipes.drivers import bucket_access, fetched_runs, launch_tokens
from recipes.platforms import programs
from recipes.platforms.targets import TARGETS
from recipes.recipe import recipe_files
from recipes.recipe.recipe_files import is_python
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from recipes.records.trust import ask_trust
from trainer.config import ConfigError
from trainer.config.run_folder import MANIFEST, write_whole
from trainer.config.run_store import RunStore
from trainer.system.records import MalformedRecord, decode_record

ANSWER_S = 10.0
"""That a store has for a small file."""
RECIPE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py:[A-Za-z_][A-Za-z0-9_]*")
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
    data["launch"] |= {"diff": None if changed else "", "untracked": {}}
    data["launch"]["record"] = asdict(replace(record, desk=record.desk or socket.gethostname()))
    if is_python(record.recipe):
        data["launch"]["recipe_file"] = Path(record.recipe.rpartition(":")[0]).read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MANIFEST
        path.write_text(f"{json.dumps(data, indent=1)}\n")
        store = RunStore.in_bucket(record.bucket, record.run_id)
        done = bucket_access.run_storage("cp", str(path), store.root, env=env, timeout_s=ANSWER_S)
    if done.returncode:
        reason = programs.last_line(done.stderr)
        print(f"warning: no other desk can drive {record.run_id}: {reason}", file=sys.stderr, flush=True)


class SharedLaunch(Struct):
    record: RunRecord | None = None
    recipe_file: Annotated[str, Meta(max_length=1 << 20)] | None = None
    """Text of the Python file of the recipe."""


class SharedManifest(Struct):
    launch: SharedLaunch


def known_or_adopted(run: str, bucket: str = "", trust: bool = False) -> None:
    """Makes sure that this desk has a record of a run. Raises ConfigError where its bucket has none, or
    none is named, or nobody trusts what it says."""
    if run_record.is_known(run):
        return
    where = bucket or fetched_runs.remembered_buckets().get(run, "")
    if not where:
        run_record.load_record(run)  # says which runs are known
    adopt_run(run, where, trust)


def adopt_run(run: str, bucket: str, trust: bool = False) -> RunRecord:
    """The record of a run that was launched elsewhere, from its bucket's manifest. Raises ConfigError.

    The bucket's words are a stranger's: each must be what such a word may be, and those that decide what is
    run here are shown, and kept only after a yes. Later commands use what was kept, not the bucket.
    """
    run_record.check_run_id(run)
    folder = run_record.RUNS / run
    store = RunStore.in_bucket(bucket, run)
    done = _cat(store.root, MANIFEST)
    if done.returncode:
        raise ConfigError(f"no launch of {run} in {store.bucket} ({programs.last_line(done.stderr)})")
    try:
        launch = decode_record(done.stdout, SharedManifest, f"{store.root}/{MANIFEST}").launch
    except MalformedRecord as error:
        raise ConfigError(str(error)) from None
    record = launch.record
    if record is None:
        raise ConfigError(f"the manifest of {run} has no record of its launch: an earlier version wrote it")
    if record.run_id != run:
        raise ConfigError(
            f"the manifest of {run} in {store.bucket} is that of {record.run_id}: it is not used"
        )
    if record.target not in TARGETS:
        raise ConfigError(f"the manifest of {run} names the target {record.target}, which there is not")
    record = replace(record, bucket=store.bucket)
    _ask_trust(record, launch.recipe_file, trust)

    (folder / ADOPTED).mkdir(parents=True, exist_ok=True)
    write_whole(folder / MANIFEST, done.stdout.encode())
    if launch.recipe_file is not None:
        name, _, function = record.recipe.rpartition(":")
        file = (folder / ADOPTED).absolute() / Path(name).name
        file.write_text(launch.recipe_file)
        record = replace(record, recipe=f"{file}:{function}")
    record.save()
    print(f"adopted {run}, launched on {record.desk} for {record.target}", file=sys.stderr, flush=True)
    return record


def _ask_trust(record: RunRecord, recipe_file: str | None, trust: bool) -> None:
    """Shows what a launch of somebody else would have this desk run, and asks. Raises ConfigError without a
    yes, and for a recipe that can be none."""
    if recipe_file is None and is_python(record.recipe):
        raise ConfigError(f"{record.run_id} was made by {record.recipe}, which its manifest does not hold")
    if recipe_file is not None and not RECIPE_FILE.fullmatch(Path(record.recipe).name):
        raise ConfigError(f"{record.run_id} names the recipe {record.recipe}, which is no FILE.py:FUNCTION")
    own = f"storage.bucket={record.bucket}"
    lines = [f"option {option}" for option in record.overrides if option != own]
    if record.flags:
        lines.append(f"passed on to the platform: {' '.join(record.flags)}")
    if recipe_file is not None:
        lines.append(f"its recipe is this Python file, {Path(record.recipe).name}:")
        lines += [f"  {line}" for line in recipe_file.splitlines()]
    if not lines:
        return
    origin = f"{record.run_id} was launched on {record.desk or 'another desk'} for {record.target}"
    writer = f"whoever can write to {record.bucket}"
    ask_trust(f"{origin}, and its bucket says of it:", lines, writer, record.run_id, trust)


def fetched_shape(store: str, folder: Path, key: str) -> str:
    """The absolute path of `folder` with the config.json of a model in a bucket; "" where it has none."""
    done = _cat(store, "config.json")
    if done.returncode:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", done.stdout.encode())
    (folder / recipe_files.STORED_NOTE).write_text(key)
    return str(folder.absolute())


def _cat(url: str, name: str) -> subprocess.CompletedProcess[str]:
    """A small file of a bucket."""
    env = launch_tokens.find_tokens() | launch_tokens.find_settings()
    return bucket_access.run_storage("cat", url, name, env=env, timeout_s=ANSWER_S)
