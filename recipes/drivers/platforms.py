"""Commands of the platforms: what `up`, `status`, `logs` and `down` run for each kind of target. Text;
nothing runs."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.platforms import job_set, kubernetes, script
from recipes.platforms.pbs import TOKENS_FILE
from recipes.presets import resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.run_folder import write_whole


@dataclass(frozen=True, kw_only=True)
class Commands:
    """How one launch is driven; each is a list of argument vectors, run in order."""

    up: list[list[str]]
    status: list[list[str]]
    logs: list[list[str]]
    down: list[list[str]]
    tool: str
    """Program that must be installed for it."""
    hint: str
    """How to get that program."""


LAUNCHERS = (
    "run `bash trainer/shell/setup.sh launch`, or install it yourself "
    "(requirements/launch.txt has the version)"
)


JOB_IDS = {"slurm": r"\d+(_\d+)?", "pbs": r"\d+(\[\d*\])?(\.[A-Za-z0-9][A-Za-z0-9.-]*)?"}
"""What a job's number looks like: `qdel all` would end all of a person's jobs."""


def launch_commands(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    """The commands for a launch. `files`: rendered task files, main one first; `secrets`: names, never
    values."""
    if record.flags and record.target in ("local", "ssh"):
        raise ConfigError(
            f"{record.target} has no platform that {' '.join(record.flags)} could be passed on to"
        )
    pattern = JOB_IDS.get(record.target)
    if pattern and record.cluster and not re.fullmatch(pattern, record.cluster):
        raise ConfigError(
            f"{record.cluster!r} is no job of {record.target}: end it by your platform's own program"
        )
    match record.target.partition("-")[0]:
        case "skypilot":
            return _sky(record, files, env, secrets, detach)
        case "dstack":
            return _dstack(record, files, env, secrets, detach)
        case "kubernetes":
            return _kubernetes(record, detach)
        case "slurm":
            return _slurm(record, files, detach)
        case "pbs":
            return _pbs(record, files, env, secrets, detach)
        case "ssh":
            return _ssh(record, detach)
        case "local":
            return _local(record, detach)
    raise AssertionError(record.target)


def _sky(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    given = []
    for name, value in env.items():
        given += ["--env", f"{name}={value}"]
    for name in secrets:
        given += ["--secret", name]
    away = ["-d"] if detach else []
    volume = _each(["sky", "volumes", "apply", "-y"], _ending(files[1:], ".volume.yaml"))
    names = record.names()
    what = [*away, *record.flags, files[0], *given]
    if record.managed:
        jobs = ["sky", "jobs"]
        logs = _each([*jobs, "logs", "-n"], names)
        return Commands(
            up=[*volume, *_each([*jobs, "launch", "-y", "-n"], names, what)],
            status=[[*jobs, "queue"]],
            logs=[[*jobs, "logs", record.cluster]] if record.cluster else logs,
            down=_each([*jobs, "cancel", "-y", "-n"], names),
            tool="sky",
            hint=LAUNCHERS,
        )
    endpoint = []
    if record.recipe == "serve":
        endpoint = [["sky", "status", "--endpoint", str(script.PORT), record.run_id]]
    return Commands(
        up=[*volume, *_each(["sky", "launch", "-y", "-c"], names, what)],
        status=[*_each(["sky", "queue"], names), *endpoint],
        logs=_each(["sky", "logs"], names),
        down=_each(["sky", "down", "-y"], names),
        tool="sky",
        hint=LAUNCHERS,
    )


def _each(words: list[str], names: list[str], more: Sequence[str] = ()) -> list[list[str]]:
    """One command for every name."""
    return [[*words, name, *more] for name in names]


def _ending(files: list[str], ending: str) -> list[str]:
    """The files whose names end so."""
    return [file for file in files if file.endswith(ending)]


def _dstack(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    task, *others = files
    before = _ending(others, ".volume.yaml") + _ending(others, ".fleet.yaml")
    given = []
    for name, value in env.items():
        given += ["-e", f"{name}={value}"]
    for name in ("HF_TOKEN", script.API_KEY, script.FLEET_KEY):
        if name in secrets:
            # Without a value dstack's client takes its own environment's. Other secrets are its server's.
            given += ["-e", name]
    away = ["-d"] if detach else []
    names = list(map(dstack_name, record.names()))
    apply = ["dstack", "apply", "-y", "-f"]
    what = [*given, *away, *record.flags]
    return Commands(
        up=[*_each(apply, before), *_each([*apply, task, "-n"], names, what)],
        status=[["dstack", "ps", "-a"]],
        logs=_each(["dstack", "logs"], names),
        down=_each(["dstack", "stop", "-y"], names),
        tool="dstack",
        hint=LAUNCHERS,
    )


RED_SQUARE = (
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR42mO4oKBAU8QwasGoBaMWjFowasGoBaMWjFow"
    "asGoBaMWDBULAE7YQD2B7wk2AAAAAElFTkSuQmCC"
)
"""A PNG of 32 by 32 pixels, base64."""


def how_to_call(record: RunRecord, model: str, sees: bool = False) -> str:
    """What a person types to reach a server. sees: whether its model takes images."""
    question: str | list[dict[str, Any]] = "What is 2 + 2?"
    if sees:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED_SQUARE}"}}
        question = [image, {"type": "text", "text": "Which color is this?"}]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    where = f"http://127.0.0.1:{script.PORT}"
    if record.target.startswith("skypilot"):
        where = f"http://$(sky status --endpoint {script.PORT} {record.run_id})"
    attach = ""
    if record.target.startswith("dstack"):
        attach = f" (`dstack attach {dstack_name(record.run_id)}` opens the port)"
    if record.target == "kubernetes":
        name = f"job/{kubernetes.set_name(record.run_id)}-{job_set.NODE}-0"
        port = f"{' '.join(kubectl(record))} port-forward {name} {script.PORT}"
        attach = f" (`{port}` opens the port)"
    key = f"$(cat {run_record.RUNS / record.run_id / 'api.key'})"
    headers = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    return (
        f"once it says `serving`{attach}:\n"
        f"  curl {where}/v1/chat/completions {headers} \\\n"
        f"    -d {shlex.quote(body)}"
    )


def dstack_name(run_id: str) -> str:
    """The run id as dstack takes it: at most 40 characters, still one of a kind."""
    if len(run_id) <= 40:
        return run_id
    digest = hashlib.sha256(run_id.encode()).hexdigest()
    return f"{run_id[:31]}-{digest[:8]}"


def kubectl(record: RunRecord) -> list[str]:
    """kubectl with what it takes to find the run's cluster and namespace."""
    return kubernetes.kubectl(resolve(record.recipe, record.overrides), record.flags)


def remove_job_set(record: RunRecord) -> list[str]:
    """The command that removes a run's JobSet, if there is one, and waits until its pods have ended."""
    remove = ["delete", kubernetes.KIND, kubernetes.set_name(record.run_id)]
    return [*kubectl(record), *remove, "--ignore-not-found", "--cascade=foreground"]


def _kubernetes(record: RunRecord, detach: bool) -> Commands:
    driver = [sys.executable, "-m", "recipes.drivers.kubernetes_driver"]
    label = f"{job_set.INSTANCE}={kubernetes.set_name(record.run_id)}"
    return Commands(
        up=[[*driver, "start" if detach else "up", record.run_id]],
        status=[[*kubectl(record), "get", f"{kubernetes.KIND},pods", "-l", label]],
        logs=[[*driver, "logs", record.run_id]],
        down=[remove_job_set(record)],
        tool="kubectl",
        hint="install the client of your cluster's version, with a kubeconfig",
    )


def _slurm(record: RunRecord, files: list[str], detach: bool) -> Commands:
    job = record.cluster or "JOBID"
    log = _batch_log(record, "slurm")
    output = _batch_log(record, "slurm", ".%a") if record.jobs > 1 else log
    up = [*_prepare(files), ["sbatch", "--parsable", f"--output={output}", *record.flags, files[0]]]
    if not detach:
        up.append(["tail", "-n", "+1", "--retry", "-F", log])
    return Commands(
        up=up,
        status=[["squeue", "-j", job]],
        logs=_each(["tail", "-n", "100", "-F"], _batch_logs(record, "slurm")),
        down=[["scancel", job]],
        tool="sbatch",
        hint="submit from a login node of the cluster",
    )


def tokens_file(run_id: str) -> Path:
    """Where a PBS job's tokens wait for it: on the file system that its nodes share, for you alone."""
    return run_record.RUNS / run_id / "tokens"


def write_tokens(run_id: str, values: Mapping[str, str]) -> None:
    """Writes a PBS job's tokens as a shell takes them."""
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in values.items()]
    path = tokens_file(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(lines).encode(), private=True)


def _pbs(
    record: RunRecord, files: list[str], env: dict[str, str], secrets: list[str], detach: bool
) -> Commands:
    job = record.cluster or "JOBID"
    log = _batch_log(record, "pbs")
    # What `-v` names stands in `qstat -f`, and is cut at commas: secrets go by a file (`tokens_file`).
    given = [*env, f"{TOKENS_FILE}={tokens_file(record.run_id)}"] if secrets else list(env)
    names = ",".join(given)
    output = _batch_log(record, "pbs", ".^array_index^") if record.jobs > 1 else log
    up = [*_prepare(files), ["qsub", "-v", names, "-o", output, *record.flags, files[0]]]
    if not detach:
        up.append(["tail", "--retry", "-n", "+1", "-F", log])
    return Commands(
        up=up,
        status=[["qstat", job]],
        logs=_each(["tail", "-n", "100", "-F"], _batch_logs(record, "pbs")),
        down=[["qdel", job]],
        tool="qsub",
        hint="submit from a login node of the cluster",
    )


def _prepare(files: list[str]) -> list[list[str]]:
    """Set-up on this node, where the compute nodes have no internet."""
    return _each(["bash"], files[1:])


def _ssh(record: RunRecord, detach: bool) -> Commands:
    driver = [sys.executable, "-m", "recipes.drivers.ssh_driver"]
    return Commands(
        up=[[*driver, "start" if detach else "up", record.run_id]],
        status=[[*driver, "status", record.run_id]],
        logs=[[*driver, "logs", record.run_id]],
        down=[[*driver, "down", record.run_id]],
        tool="ssh",
        hint="install an ssh client and rsync",
    )


def _local(record: RunRecord, detach: bool) -> Commands:
    driver = [sys.executable, "-m", "recipes.drivers.local_driver"]
    return Commands(
        up=[[*driver, "start" if detach else "up", record.run_id]],
        status=[],
        logs=[[*driver, "logs", record.run_id]],
        down=[[*driver, "down", record.run_id]],
        tool="bash",
        hint="install bash",
    )


def _batch_log(record: RunRecord, platform: str, part: str = "") -> str:
    return f"runs/{record.run_id}/{platform}{part}.log"


def _batch_logs(record: RunRecord, platform: str) -> list[str]:
    """The log of each job; those of an array have its index in their names."""
    if record.jobs == 1:
        return [_batch_log(record, platform)]
    return [_batch_log(record, platform, f".{i}") for i in range(record.jobs)]


def find_program(program: str) -> str:
    """Path of a program: on the PATH, or in the launch environment; empty if neither has it."""
    on_path = shutil.which(program)
    if on_path:
        return on_path
    own = Path(".venvs/launch/bin") / program
    return str(own.absolute()) if own.is_file() else ""
