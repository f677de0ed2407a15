"""kubectl: how it is called for a run, what it refuses, which of a run's pods is the head."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from recipes.platforms import programs
from recipes.platforms.job_set import RANK_LABEL, SET_LABEL, set_name
from recipes.presets import resolve
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

KIND = "jobsets.jobset.x-k8s.io"
"""JobSets, as kubectl takes the word."""
AWAY = ("Unable to connect", "connection to the server", "dial tcp")
"""What kubectl says where no API server answers."""


def kubectl(recipe: Recipe, flags: list[str]) -> list[str]:
    """kubectl with what it takes to find the recipe's cluster and namespace. flags: after `--` at the
    launch."""
    site = recipe.site
    context = ["--context", site.kubernetes_context] if site.kubernetes_context else []
    namespace = ["--namespace", site.namespace] if site.namespace else []
    return ["kubectl", *context, *namespace, *flags]


def kubectl_of(record: RunRecord) -> list[str]:
    """kubectl with what it takes to find the run's cluster and namespace."""
    return kubectl(resolve(record.recipe, record.overrides), record.flags)


def remove_job_set(record: RunRecord) -> list[str]:
    """The command that removes a run's JobSet, if there is one, and waits until its pods have ended."""
    remove = ["delete", KIND, set_name(record.run_id)]
    return [*kubectl_of(record), *remove, "--ignore-not-found", "--cascade=foreground"]


def kubectl_program(record: RunRecord) -> list[str]:
    """kubectl by its path."""
    program, *options = kubectl_of(record)
    return [programs.find_program(program) or program, *options]


def run_kubectl(command: list[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command of kubectl. given: its standard input."""
    return subprocess.run(command, input=given, capture_output=True, text=True)


def checked_output(command: list[str], given: str | None = None) -> str:
    """What a command of kubectl printed. Raises ConfigError with the change to make."""
    done = run_kubectl(command, given)
    if done.returncode:
        raise ConfigError(refusal_of(done.stderr))
    return done.stdout


def refusal_of(complaint: str) -> str:
    """What kubectl complained about, and the change to make where that is known."""
    reason = "nothing"
    for line in complaint.strip().splitlines():
        if not line.startswith("ensure CRDs"):
            reason = line
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


@dataclass
class HeadPod:
    """A pod of the head. Each try of a run has one of its own."""

    name: str
    begun: bool = False
    """Whether its container runs, or has run."""
    over: bool = False
    """Whether its container has ended."""


def head_pods(record: RunRecord) -> list[HeadPod]:
    """The head's pods, oldest first; none where the cluster does not answer."""
    name = set_name(record.run_id)
    labels = f"{SET_LABEL}={name},{RANK_LABEL}=0"
    done = run_kubectl([*kubectl_program(record), "get", "pods", "-l", labels, "-o", "json"])
    if done.returncode:
        return []
    heads = []
    pods = json.loads(done.stdout)["items"]
    for described in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        pod = HeadPod(described["metadata"]["name"])
        for container in described.get("status", {}).get("containerStatuses", []):
            if "terminated" in container["state"]:
                pod.begun = True
                pod.over = True
            if "running" in container["state"]:
                pod.begun = True
        heads.append(pod)
    return heads
