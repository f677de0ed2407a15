"""Kubernetes without a tool between: `kubectl` creates a JobSet (`job_set`).

The code comes in a ConfigMap: packed it takes nine tenths of the 1 MiB that one may hold, kubectl alone
writes it, and a pod unpacks it before it has an environment or any client of a bucket. (A tarball in the
bucket would need such a client in every image, and a git URL would leave out what is not committed, and
private repositories.)
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult

from recipes.platforms import clouds, pods, programs, restarts, script
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers
from recipes.platforms.base import Commands, Disposable, LaunchGiven, desk_driver, for_each, to_yaml
from recipes.platforms.job_set import (
    ARCHIVE,
    INSTANCE,
    LONGEST_NAME,
    NAME,
    NODE,
    RANK_LABEL,
    SET_LABEL,
    claim,
    job_set,
    of_run,
    set_name,
)
from recipes.presets import resolve
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError, never_sent

KIND = "jobsets.jobset.x-k8s.io"
"""JobSets, as kubectl takes the word."""
AWAY = ("Unable to connect", "connection to the server", "dial tcp")
"""What kubectl says where no API server answers."""
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
"""Why a pod waits that cannot pull its image: left alone, it holds all GPUs to the end of the run's hours."""
TOKENS = "$HOME/.spotrl/tokens.env"
"""File with tokens that the head of a rendered file names: no place of the repository, which is sent."""
LEFT_OUT = (
    "tests", "docs", "benchmarks", "runs", "recipes/commands", "recipes/drivers", "recipes/generated",
    "recipes/screens", "recipes/records/reproduce.py", "trainer/observe/mirror.py",
    "trainer/observe/publish.py", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md",
    "SECURITY.md", "requirements/owners.py", "requirements/lock.py", "requirements/launch.txt",
    "requirements/test.txt", "__pycache__", "code.tar",
    ARCHIVE,
)  # fmt: skip
"""Files and folders that no node needs, locks of other environments among them, besides hidden ones and those
of `never_sent`."""
CHECKS = ("tests/conftest.py", "tests/families.py", "tests/servers.py", "tests/gpu", "tests/learning")
"""What a check of a card needs of it all the same."""
NOT_CHECKED = ("tests/learning/test_*.py", "tests/learning/rank_scripts")
"""Tests and scenarios in one of these folders that need no card."""
APPLY = ("apply", "--server-side", "--force-conflicts", "-f", "-")
"""The server's own apply leaves no second copy of the tokens in an annotation."""


class Kubernetes(Disposable):
    program = "kubectl"
    title = "`kubectl`"
    hint = "install the client of your cluster's version, with a kubeconfig"

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The JobSet and, where the recipe names a volume, its claim."""
        recipe = run.recipe
        files = {f"{recipe.name}.yaml": to_yaml(job_set(self, recipe), _head(recipe))}
        if recipe.storage.volume:
            files[f"{recipe.name}.volume.yaml"] = to_yaml(
                claim(recipe), "The claim at /workspace; once, before the run."
            )
        return files

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        label = f"{INSTANCE}={set_name(record.run_id)}"
        return Commands(
            up=[desk_driver("start" if given.detach else "up", record)],
            status=[[*kubectl_of(record), "get", f"{KIND},pods", "-l", label]],
            logs=[desk_driver("logs", record)],
            down=[remove_job_set(record)],
        )

    def shown_commands(self, record: RunRecord, files: Sequence[Path]) -> list[str]:
        program = kubectl_of(record)
        task, *claims = map(str, files)
        commands = for_each([*program, "apply", "-f"], claims)
        commands += [[*program, "create", "-f", task], [*program, *APPLY]]
        return ["# --- which runs, with tokens and code on standard input", *map(shlex.join, commands)]

    def with_run_id(self, text: str, run_id: str) -> str:
        return of_run(text, run_id)

    def check(self, recipe: Recipe, record: RunRecord, task: str) -> None:
        """Has the cluster judge the JobSet without creating it: its controller, your rights, quotas."""
        done = run_kubectl([*kubectl_of(record), "create", "--dry-run=server", "-f", "-"], given=task)
        if done.returncode and "already exists" not in done.stderr:
            raise ConfigError(refusal_of(done.stderr))

    def ask(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        """One set has all jobs of a run."""
        name = set_name(record.run_id)
        program = kubectl_of(record)
        listed = answers.rows(*program, "get", KIND, "-o", "json")
        if listed is None:
            return None
        sets = [row for row in listed["items"] if row["metadata"]["name"] == name]
        if not sets:
            text = f"JobSet {name}: not in the cluster"
            return PlatformAnswer(text=text, state="gone", ended_s=time.time(), known=False)
        of_set = ("-l", f"{SET_LABEL}={name}", "-o", "json")
        jobs = answers.rows(*program, "get", "jobs", *of_set) or {"items": []}
        ended = _condition(sets[0].get("status", {}), "Completed", "Failed")
        if ended:
            return _end(name, ended, jobs["items"])
        if sets[0]["spec"].get("suspend"):
            return PlatformAnswer(text=f"JobSet {name}: waits for its queue", state="queued")
        answer = _progress(name, sets[0], jobs["items"])
        if answer.state != "starting":
            return answer
        pods_of_set = (answers.rows(*program, "get", "pods", *of_set) or {"items": []})["items"]
        reasons = list(filter(None, dict.fromkeys(map(_waits_for, pods_of_set))))
        why = next((reason for reason in reasons if reason.startswith(NO_IMAGE)), "")
        waits = bool(pods_of_set) and all(map(_without_machine, pods_of_set))
        state = "queued" if waits else answer.state
        return replace(answer, text="; ".join([answer.text, *reasons]), why=why, state=state)

    def server_address(self, record: RunRecord) -> tuple[str, str]:
        job = f"job/{set_name(record.run_id)}-{NODE}-0"
        port = f"{' '.join(kubectl_of(record))} port-forward {job} {script.PORT}"
        return super().server_address(record)[0], f" (`{port}` opens the port)"

    def read_from_head(self, record: RunRecord, path: str, dry_run: bool) -> list[str]:
        pod = "pod/HEAD" if dry_run else head_pod(record)
        return [*kubectl_of(record), "exec", pod, "--", "sh", "-c", f'cat "$HOME"/{path}']

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        return [*kubectl_of(record), "port-forward", head_pod(record), f"{port}:{there.port}"]

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        own = {"site.namespace", "site.gpu_label", "site.grace_s"}
        if recipe.cluster.nodes > 1:
            own.add("site.topology")  # pods that stand together
        counted = recipe.cluster.nodes > 1 or recipe.kind == "sample"  # one pod: the run counts
        if counted and restarts.restart_codes(recipe):
            own.add("budget.max_requeues")
        return self.OBEYS | pods.obeyed(recipe) | own


KUBERNETES = Kubernetes(
    name="kubernetes",
    cloud="kubernetes",
    max_nodes=64,
    spot=True,
    gpus=clouds.LABELLED,
    network_gbit_s={"": 400},
    note="your cluster with the JobSet controller; no tool between",
)


def _end(name: str, ended: dict[str, Any], jobs: list[dict[str, Any]]) -> PlatformAnswer:
    """The answer for a set that has ended, by that condition."""
    why = ""
    if ended["type"] == "Failed":  # a job says more of its failure than the set that it ended
        failures = [_condition(job.get("status", {}), "Failed") for job in jobs]
        why = [*filter(None, failures), ended][0]["message"]
    return PlatformAnswer(
        text=f"JobSet {name}: {ended['type']}" + (f" ({why})" if why else ""),
        state="failed" if ended["type"] == "Failed" else "finished",
        why=why,
        ended_s=datetime.fromisoformat(ended["lastTransitionTime"]).timestamp(),
    )


def _progress(name: str, job_set: dict[str, Any], jobs: list[dict[str, Any]]) -> PlatformAnswer:
    """The answer for a set that goes on."""
    statuses = [job.get("status", {}) for job in jobs]
    ready = sum(status.get("ready", 0) for status in statuses)
    failed = sum(status.get("failed", 0) for status in statuses)
    restarted = failed + job_set.get("status", {}).get("restarts", 0)
    wanted = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    state = "running" if ready == wanted else "starting"
    text = f"JobSet {name}: {state}, {ready} of {wanted} pods run, restarted {restarted} times"
    return PlatformAnswer(text=text, state=state)


def _condition(status: dict[str, Any], *types: str, holds: str = "True") -> dict[str, Any] | None:
    """The condition of one of these types that holds, or does not ("False"); None without one."""
    for condition in status.get("conditions", []):
        if condition["type"] in types and condition["status"] == holds:
            return condition
    return None


def _without_machine(pod: dict[str, Any]) -> dict[str, Any] | None:
    """The scheduler's condition of a pod for which it has found no machine, which costs nothing."""
    return _condition(pod.get("status", {}), "PodScheduled", holds="False")


def _waits_for(pod: dict[str, Any]) -> str:
    """Why a pod does not run yet, in the scheduler's or the node's words; "" where neither says."""
    if unscheduled := _without_machine(pod):
        return unscheduled.get("message", "")
    states = [container["state"] for container in pod.get("status", {}).get("containerStatuses", [])]
    waiting = [state["waiting"] for state in states if state.get("waiting", {}).get("message")]
    return f"{waiting[0]['reason']}: {waiting[0]['message']}" if waiting else ""


def kubectl(recipe: Recipe) -> list[str]:
    """kubectl with what it takes to find the recipe's cluster and namespace."""
    site = recipe.site
    context = ["--context", site.kubernetes_context] if site.kubernetes_context else []
    namespace = ["--namespace", site.namespace] if site.namespace else []
    return ["kubectl", *context, *namespace]


def kubectl_of(record: RunRecord) -> list[str]:
    """kubectl for a run, with the flags that stood after `--` at its launch."""
    return [*kubectl(resolve(record.recipe, record.overrides)), *record.flags]


def remove_job_set(record: RunRecord) -> list[str]:
    """The command that removes a run's JobSet, if there is one, and waits until its pods have ended."""
    remove = ["delete", KIND, set_name(record.run_id)]
    return [*kubectl_of(record), *remove, "--ignore-not-found", "--cascade=foreground"]


def run_kubectl(command: list[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command of kubectl. given: its standard input."""
    argv = [programs.find_program(command[0]) or command[0], *command[1:]]
    return subprocess.run(argv, input=given, capture_output=True, text=True)


def checked_output(command: list[str], given: str | None = None) -> str:
    """What a command of kubectl printed. Raises ConfigError with the change to make."""
    done = run_kubectl(command, given)
    if done.returncode:
        raise ConfigError(refusal_of(done.stderr))
    return done.stdout


def refusal_of(complaint: str) -> str:
    """What kubectl complained about, and the change to make where that is known."""
    lines = [line for line in complaint.strip().splitlines() if not line.startswith("ensure CRDs")]
    reason = lines[-1] if lines else "nothing"
    if "no matches for kind" in reason:
        return "the cluster has no JobSet controller: have JobSet installed there"
    if "(Forbidden)" in reason:
        return f"your account lacks a right ({reason}): ask for a role that has it, or set site.namespace"
    if any(words in reason for words in AWAY):
        return (
            f"kubectl does not reach the cluster ({reason}): choose one with `kubectl config use-context`, "
            "or set site.kubernetes_context"
        )
    return f"kubectl says: {reason}"


def head_pod(record: RunRecord) -> str:
    """The head's pod that is running now, as kubectl takes it. Raises ConfigError without one."""
    running = [pod.name for pod in head_pods(record) if pod.begun and not pod.over]
    if not running:
        raise ConfigError(f"no pod of {record.run_id} is running: `python3 launch.py status {record.run_id}`")
    return f"pod/{running[-1]}"


class HeadPod(NamedTuple):
    """A pod of the head. Each try of a run has one of its own."""

    name: str
    begun: bool
    """Whether its container runs, or has run."""
    over: bool
    """Whether its container has ended."""


def head_pods(record: RunRecord) -> list[HeadPod]:
    """The head's pods, oldest first; none where the cluster does not answer."""
    labels = f"{SET_LABEL}={set_name(record.run_id)},{RANK_LABEL}=0"
    done = run_kubectl([*kubectl_of(record), "get", "pods", "-l", labels, "-o", "json"])
    if done.returncode:
        return []
    heads = []
    for pod in sorted(json.loads(done.stdout)["items"], key=lambda pod: pod["metadata"]["creationTimestamp"]):
        containers = pod.get("status", {}).get("containerStatuses", [])
        over = any("terminated" in container["state"] for container in containers)
        runs = any("running" in container["state"] for container in containers)
        heads.append(HeadPod(pod["metadata"]["name"], over or runs, over))
    return heads


def left_out(recipe: Recipe) -> tuple[str, ...]:
    """Files and folders that no node of the recipe needs: nodes with GPUs not the lock of those without."""
    return LEFT_OUT if recipe.environment == "cpu" else (*LEFT_OUT, "requirements/cpu.txt")


def _head(recipe: Recipe) -> str:
    path = f"recipes/generated/{KUBERNETES.name}/{recipe.name}"
    program = " ".join(kubectl(recipe))
    tokens = script.API_KEY if recipe.kind == "serve" else "HF_TOKEN, AWS_ACCESS_KEY_ID"
    if recipe.uses_bucket and not recipe.storage.bucket:
        tokens += ", BUCKET"
    secrets = f"--exclude-from={never_sent.IN_TREE}"
    tar = f"tar -cf code.tar {secrets} {' '.join(f'--exclude={name}' for name in left_out(recipe))} *"
    if recipe.kind == "check":
        needless = " ".join(f"--exclude={name}" for name in NOT_CHECKED)
        tar += f" && tar -rf code.tar {secrets} {needless} {' '.join(CHECKS)}"
    lines = [
        script.written_by(recipe, KUBERNETES.name),
        f"  {tar} && gzip -f code.tar",
        f"  {program} create configmap try-1 --from-file={ARCHIVE}",
        f"  {program} create secret generic try-1 --from-env-file={TOKENS}    # NAME=value: {tokens}, ...",
        *([f"  {program} apply -f {path}.volume.yaml"] if recipe.storage.volume else []),
        f"  sed s/{NAME}/try-1/g {path}.yaml | {program} create -f -",
        f"The cluster needs the JobSet controller. A name has at most {LONGEST_NAME} characters.",
        script.run_id_comment(recipe),
    ]
    return "\n".join(lines)
