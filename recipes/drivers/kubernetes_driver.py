"""Starts a run on Kubernetes and follows it, by kubectl: its JobSet, then the Secret and the ConfigMap that
the pods wait for.

Tokens and code go to kubectl on standard input. The JobSet owns both objects, so that they go when it goes.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import tarfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recipes.drivers import launched_run
from recipes.platforms import kubernetes, programs, script
from recipes.platforms.job_set import ARCHIVE, set_name
from recipes.platforms.kubernetes import checked_output, head_pods, kubectl_of, remove_job_set, run_kubectl
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.never_sent import is_secret
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 20
"""What a ConfigMap may hold."""
GIVEN = ("SPOTRL_SOURCE", "SPOTRL_LAUNCH", *script.SETTINGS)
"""Variables of a launch that its pods get besides tokens."""
POLL_S = float(os.environ.get("SPOTRL_POLL_S", "5"))


def up(record: RunRecord) -> int:
    """Starts the run and follows it to its end."""
    create(record)
    return follow(record, set())


def start(record: RunRecord) -> int:
    """Starts the run and leaves it once it has its machines, or waits for them."""
    create(record)
    return follow(record, set(), detached=True)


def logs(record: RunRecord) -> int:
    """Follows the newest pod of the head from its last lines on, and those that come after it."""
    begun = [pod.name for pod in head_pods(record) if pod.begun]
    return follow(record, set(begun[:-1]), tail=100)


def create(record: RunRecord) -> None:
    """Creates the run's objects, in the place of those of a launch that has ended. Raises ConfigError."""
    program = kubectl_of(record)
    name = set_name(record.run_id)
    answer = launched_run.ask_platform(record)
    if answer and answer.known and not answer.ended_s:
        raise ConfigError(f"{answer.text}: `python3 launch.py down {record.run_id}` ends it")
    task, *claims = map(str, record.task_files())
    if answer and answer.known:
        checked_output(remove_job_set(record))
    for claim in claims:
        checked_output([*program, "apply", "-f", claim])
    made = checked_output([*program, "create", "-f", task, "-o", "json"])
    print(f"JobSet {name} is created", flush=True)
    try:
        objects = given_objects(record, name, json.loads(made)["metadata"]["uid"])
        checked_output([*program, *kubernetes.APPLY], given="\n".join(map(json.dumps, objects)))
    except BaseException:  # its pods would wait for tokens and code for ever
        run_kubectl(remove_job_set(record))
        raise


def given_objects(record: RunRecord, name: str, owner: str) -> list[dict[str, Any]]:
    """The Secret with the tokens that the run uses, and the ConfigMap with the code, both owned by the JobSet
    `name` whose uid is `owner`."""
    recipe = resolve(record.recipe, record.overrides)
    names = (*script.secret_names(recipe), *GIVEN)
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    reference = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": owner}
    metadata: dict[str, Any] = {"name": name, "ownerReferences": [reference]}
    if recipe.site.namespace:
        metadata["namespace"] = recipe.site.namespace
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}
    code = base64.b64encode(packed_tree(ROOT, recipe)).decode()
    binary = {"binaryData": {ARCHIVE: code}}
    return [secret, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata} | binary]


def packed_tree(root: Path, recipe: Recipe) -> bytes:
    """The repository as a node of the recipe needs it: a compressed archive, the same for the same files.
    Raises ConfigError where a ConfigMap cannot hold it."""

    left_out = kubernetes.left_out(recipe)

    def as_packed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(entry.name).name
        not_checked = any(fnmatchcase(entry.name, pattern) for pattern in kubernetes.NOT_CHECKED)
        needless = name in left_out or entry.name in left_out or not_checked
        if name.startswith(".") or needless or is_secret(name):
            return None
        # Whose files they are, and since when, is left out: equal files make equal archives.
        entry.mtime = 0
        entry.uid = 0
        entry.gid = 0
        entry.uname = ""
        entry.gname = ""
        return entry

    names = sorted(path.name for path in root.iterdir())
    if recipe.kind == "check":
        names += kubernetes.CHECKS
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name in names:
            archive.add(root / name, name, filter=as_packed)
    if buffer.tell() > MOST_BYTES:
        raise ConfigError(
            f"the repository has {buffer.tell() >> 10} KiB compressed, and a ConfigMap holds "
            f"{MOST_BYTES >> 10}: move data and results out of it"
        )
    return buffer.getvalue()


def follow(record: RunRecord, seen: set[str], tail: int = -1, detached: bool = False) -> int:
    """Follows the run until it has ended, or Ctrl-C. Returns the exit code."""
    try:
        return _follow(record, seen, tail, detached)
    except KeyboardInterrupt:
        print(f"\nthe run continues: `python3 launch.py logs {record.run_id}` follows it, `down` ends it")
        return EXIT_INTERRUPTED


def _follow(record: RunRecord, seen: set[str], tail: int, detached: bool) -> int:
    """Shows the logs of the head's pods but those of `seen`, one after the other, until the JobSet has ended:
    0, or 1 where it failed; 2 where the pods could not pull their image for the start's limit, which ends
    them. tail: lines to begin with; -1: all. detached: shows none, and only until all pods have their image,
    wait for machines, or have had the start's limit for it."""
    last = ""
    began_s = time.monotonic()
    pulling_since = 0.0
    limit_s = resolve(record.recipe, record.overrides).config.placement.start_timeout_s
    while True:
        answer = launched_run.ask_platform(record)
        heads = [] if detached else head_pods(record)
        new = [pod.name for pod in heads if pod.begun and pod.name not in seen]
        if new:
            seen.add(new[0])
            _show_log(record, new[0], tail)
            continue
        if answer and (answer.ended_s or not answer.known):
            print(answer.text, flush=True)
            return EXIT_OK if answer.state == "finished" else EXIT_ERROR
        no_image = answer.why if answer else ""
        pulling_since = (pulling_since or time.monotonic()) if no_image else 0.0
        if no_image and time.monotonic() - pulling_since > limit_s:
            print(
                f"error: {no_image}: ended, so that its GPUs are free (site.image_secret names a login)",
                flush=True,
            )
            run_kubectl(remove_job_set(record))
            return EXIT_CONFIG
        if answer and answer.text != last:
            last = answer.text
            print(last, flush=True)
        settled = answer is not None and answer.state != "starting"
        if detached and not no_image and (settled or time.monotonic() - began_s > limit_s):
            return EXIT_OK
        time.sleep(POLL_S)


def _show_log(record: RunRecord, pod: str, tail: int) -> None:
    program, *options = kubectl_of(record)
    argv = [programs.find_program(program) or program, *options, "logs", "--follow", f"--tail={tail}", pod]
    process = subprocess.Popen(argv)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
