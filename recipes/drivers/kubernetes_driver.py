"""Starts a run on Kubernetes and follows it, by kubectl: its JobSet, then the Secret and the ConfigMap that
the pods wait for.

`python -m recipes.drivers.kubernetes_driver up|start|logs RUN_ID`; launch.py calls it. Tokens and code go to
kubectl on standard input. The JobSet owns both objects, so that they go when it goes.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recipes.drivers import platform_state, platforms
from recipes.platforms import kubernetes, script
from recipes.platforms.job_set import ARCHIVE, RANK_LABEL, SET_LABEL
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.never_sent import is_secret
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 20
"""What a ConfigMap may hold."""
GIVEN = ("SPOTRL_SOURCE", "SPOTRL_LAUNCH", *script.SETTINGS)
"""Variables of a launch that its pods get besides tokens."""
APPLY = ("apply", "--server-side", "--force-conflicts", "-f", "-")
"""The server's own apply leaves no second copy of the tokens in an annotation."""
AWAY = ("Unable to connect", "connection to the server", "dial tcp")
"""What kubectl says where no API server answers."""
POLL_S = float(os.environ.get("SPOTRL_POLL_S", "5"))


def check_job_set(record: RunRecord, text: str) -> None:
    """Has the cluster judge a JobSet without creating it: its controller, your rights, quotas. Raises
    ConfigError with the change to make."""
    done = _said([*_program(record), "create", "--dry-run=server", "-f", "-"], given=text)
    if done.returncode and "already exists" not in done.stderr:
        raise ConfigError(_refusal(done.stderr))


def up(record: RunRecord) -> int:
    """Starts the run and follows it to its end."""
    start(record)
    return follow(record, set())


def logs(record: RunRecord) -> int:
    """Follows the newest pod of the head from its last lines on, and those that come after it."""
    begun = [pod.name for pod in _head_pods(record) if pod.begun]
    return follow(record, set(begun[:-1]), tail=100)


def start(record: RunRecord) -> int:
    """Creates the run's objects, in the place of those of a launch that has ended. Raises ConfigError."""
    program = _program(record)
    name = kubernetes.set_name(record.run_id)
    said = platform_state.ask_platform(record)
    if said and said.known and not said.ended_s:
        raise ConfigError(f"{said.text}: `python3 launch.py down {record.run_id}` ends it")
    task, *claims = map(str, record.task_files())
    remove = [program[0], *platforms.remove_job_set(record)[1:]]
    if said and said.known:
        _run(remove)
    for claim in claims:
        _run([*program, "apply", "-f", claim])
    made = _run([*program, "create", "-f", task, "-o", "json"])
    print(f"JobSet {name} is created", flush=True)
    try:
        objects = given_objects(record, name, json.loads(made)["metadata"]["uid"])
        _run([*program, *APPLY], given="\n".join(map(json.dumps, objects)))
    except BaseException:  # its pods would wait for tokens and code for ever
        _said(remove)
        raise
    return EXIT_OK


def shown_commands(record: RunRecord, files: list[Path]) -> list[str]:
    """The commands of `start`, for a dry run."""
    program = platforms.kubectl(record)
    task, *claims = map(str, files)
    commands = [[*program, "apply", "-f", claim] for claim in claims]
    commands.append([*program, "create", "-f", task])
    commands.append([*program, *APPLY])
    return list(map(shlex.join, commands))


def given_objects(record: RunRecord, name: str, owner: str) -> list[dict[str, Any]]:
    """The Secret with the tokens that the run uses, and the ConfigMap with the code, both owned by the JobSet
    `name` whose uid is `owner`."""
    recipe = resolve(record.recipe, record.overrides)
    values = {}
    for key in (*script.secret_names(recipe), *GIVEN):
        if os.environ.get(key):
            values[key] = os.environ[key]
    reference = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": owner}
    metadata: dict[str, Any] = {"name": name, "ownerReferences": [reference]}
    if recipe.site.namespace:
        metadata["namespace"] = recipe.site.namespace
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}
    code = base64.b64encode(packed_tree(ROOT, recipe)).decode()
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    files |= {"binaryData": {ARCHIVE: code}}
    return [secret, files]


def packed_tree(root: Path, recipe: Recipe) -> bytes:
    """The repository as a node of the recipe needs it: a compressed archive, the same for the same files.
    Raises ConfigError where a ConfigMap cannot hold it."""

    def as_packed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(entry.name).name
        left_out = name in kubernetes.LEFT_OUT or entry.name in kubernetes.LEFT_OUT
        if (
            fnmatchcase(entry.name, kubernetes.NOT_CHECKED)
            or name.startswith(".")
            or left_out
            or is_secret(name)
        ):
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


def follow(record: RunRecord, seen: set[str], tail: int = -1) -> int:
    """Shows the logs of the head's pods but those of `seen`, one after the other, until the JobSet has ended:
    0, or 1 where it failed. tail: lines to begin with; -1: all."""
    last = ""
    while True:
        said = platform_state.ask_platform(record)
        new = [pod.name for pod in _head_pods(record) if pod.begun and pod.name not in seen]
        if new:
            seen.add(new[0])
            _show_log(record, new[0], tail)
            continue
        if said and (said.ended_s or not said.known):
            print(said.text, flush=True)
            return EXIT_OK if said.state == "finished" else EXIT_ERROR
        if said and said.text != last:
            last = said.text
            print(last, flush=True)
        time.sleep(POLL_S)


def _show_log(record: RunRecord, pod: str, tail: int) -> None:
    process = subprocess.Popen([*_program(record), "logs", "--follow", f"--tail={tail}", pod])
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def head_pod(record: RunRecord) -> str:
    """The head's pod that is running now, as kubectl takes it. Raises ConfigError without one."""
    running = [pod.name for pod in _head_pods(record) if pod.begun and not pod.over]
    if not running:
        raise ConfigError(f"no pod of {record.run_id} is running: `python3 launch.py status {record.run_id}`")
    return f"pod/{running[-1]}"


@dataclass
class HeadPod:
    """A pod of the head. Each try of a run has one of its own."""

    name: str
    begun: bool = False
    """Whether its container runs, or has run."""
    over: bool = False
    """Whether its container has ended."""


def _head_pods(record: RunRecord) -> list[HeadPod]:
    """The head's pods, oldest first; none where the cluster does not answer."""
    name = kubernetes.set_name(record.run_id)
    labels = f"{SET_LABEL}={name},{RANK_LABEL}=0"
    done = _said([*_program(record), "get", "pods", "-l", labels, "-o", "json"])
    if done.returncode:
        return []
    found = []
    pods = json.loads(done.stdout)["items"]
    for described in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        pod = HeadPod(described["metadata"]["name"])
        for container in described.get("status", {}).get("containerStatuses", []):
            if "terminated" in container["state"]:
                pod.begun = True
                pod.over = True
            if "running" in container["state"]:
                pod.begun = True
        found.append(pod)
    return found


def _program(record: RunRecord) -> list[str]:
    program, *options = platforms.kubectl(record)
    return [platforms.find_program(program) or program, *options]


def _said(command: list[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True)


def _run(command: list[str], given: str | None = None) -> str:
    """What a command of kubectl printed. Raises ConfigError with the change to make."""
    done = _said(command, given)
    if done.returncode:
        raise ConfigError(_refusal(done.stderr))
    return done.stdout


def _refusal(complaint: str) -> str:
    """What kubectl complained about, and the change to make where that is known."""
    said = "nothing"
    for line in complaint.strip().splitlines():
        if not line.startswith("ensure CRDs"):
            said = line
    if "no matches for kind" in said:
        return "the cluster has no JobSet controller: have JobSet installed there"
    if "(Forbidden)" in said:
        return f"your account lacks a right ({said}): ask for a role that has it, or set site.namespace"
    if any(words in said for words in AWAY):
        return (
            f"kubectl does not reach the cluster ({said}): choose one with `kubectl config use-context`, or "
            "set site.kubernetes_context"
        )
    return f"kubectl says: {said}"


def main(what: str, run_id: str) -> int:
    record = run_record.load_record(run_id)
    try:
        match what:
            case "up":
                return up(record)
            case "start":
                return start(record)
            case "logs":
                return logs(record)
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print(f"\nthe run continues: `python3 launch.py logs {run_id}` follows it, `down` ends it")
        return EXIT_INTERRUPTED
    raise AssertionError(what)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
