"""The JobSet that a run on Kubernetes is: one indexed Job, whose pods are the run's nodes.

Fields of JobSet v1alpha2 and Kubernetes 1.31.
"""

from __future__ import annotations

import hashlib
from typing import Any

from recipes.platforms import pods, restarts, script
from recipes.platforms.base import Disposable
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT

NAME = "spotrl-run-id"
"""What stands for the run's id in a rendered file, and for the name of its JobSet, Secret and ConfigMap."""
LONGEST_NAME = 40
"""Characters of a JobSet's name: those of its pods have up to 23 more, and 63 is the limit."""
CODE = "/spotrl"
"""Where the repository stands in the container."""
ARCHIVE, ARCHIVE_FOLDER = "code.tar.gz", "/etc/spotrl"
"""Key of the ConfigMap that holds the code, and where that is mounted."""
CONTAINER, NODE = "spotrl", "node"
"""Name of the container, and of the JobSet's one Job."""
KEPT_S = 3 * 24 * 3600
"""Seconds until a JobSet that has ended is removed, and the tokens and the code with it."""
SPOT_NOTICE_S = 15
"""Seconds that a pod has on a spot node of GKE; elsewhere it is site.grace_s."""
INSTANCE = "app.kubernetes.io/instance"
"""Label of a JobSet and its pods: the JobSet's name."""
SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""Label that JobSet gives to its Jobs and their pods."""
RANK_LABEL = "batch.kubernetes.io/job-completion-index"
"""Label that Kubernetes gives to the pods of an indexed Job."""

SPOT_LABELS = {
    "cloud.google.com/gke-spot": "true",
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of preemptible nodes; on some clusters they are taints as well."""
GKE_LABEL = "cloud.google.com/gke-accelerator"
GKE_CARDS = {
    "L4": ("nvidia-l4",), "A100": ("nvidia-tesla-a100",), "A100-80GB": ("nvidia-a100-80gb",),
    "H100": ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"), "H200": ("nvidia-h200-141gb",),
    "B200": ("nvidia-b200",),
}  # fmt: skip
"""GKE's node label, and its values by our names."""
NVIDIA_LABEL = "nvidia.com/gpu.product"
NVIDIA_CARDS = {
    "L4": ("NVIDIA-L4",), "L40S": ("NVIDIA-L40S",), "A100": ("NVIDIA-A100-SXM4-40GB",),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB",), "H100": ("NVIDIA-H100-80GB-HBM3",), "H200": ("NVIDIA-H200",),
    "B200": ("NVIDIA-B200",),
}  # fmt: skip
"""The node label of NVIDIA's GPU feature discovery, and its values by our names."""
SINGLE_CARDS = {
    "A100": ("NVIDIA-A100-PCIE-40GB",), "A100-80GB": ("NVIDIA-A100-80GB-PCIe",),
    "H100": ("NVIDIA-H100-PCIe",),
}  # fmt: skip
"""Cards without NVLink, which do where a node has one."""
UNLIMITED = 2**31 - 1
"""Pods that a Job may replace: the run counts."""


def job_set(platform: Disposable, recipe: Recipe) -> dict[str, Any]:
    site = recipe.site
    pods = recipe.jobs if recipe.kind == "sample" else recipe.cluster.nodes
    name = f"{NAME}-sample" if recipe.kind == "sample" else NAME
    labels = {"app.kubernetes.io/name": "spotrl", INSTANCE: name}
    metadata: dict[str, Any] = {"name": name}
    if site.namespace:
        metadata["namespace"] = site.namespace
    # Kueue starts the set once its queue has room for all pods.
    metadata["labels"] = labels | ({"kueue.x-k8s.io/queue-name": site.queue} if site.queue else {})
    if site.topology and recipe.cluster.nodes > 1:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": site.topology}
    job = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "activeDeadlineSeconds": round(3600 * recipe.budget.max_hours),
        **_restarts_of_job(recipe, CONTAINER),
        "template": {"metadata": {"labels": labels}, "spec": _pod(platform, recipe)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _restarts_of_set(recipe),
            "ttlSecondsAfterFinished": KEPT_S,
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(platform: Disposable, recipe: Recipe) -> dict[str, Any]:
    work: dict[str, Any] = {"emptyDir": {}}
    if recipe.storage.volume:
        work = {"persistentVolumeClaim": {"claimName": recipe.storage.volume}}
    shm = {"medium": "Memory", "sizeLimit": f"{recipe.cluster.shm_gib}Gi"}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": recipe.site.grace_s,
        "automountServiceAccountToken": False,
        # A shell that is process 1 ignores SIGTERM, so an eviction would wait for the set-up to end.
        "shareProcessNamespace": True,
        **pods.pull_secret(recipe),
        **_placement(platform, recipe),
        "containers": [_container(platform, recipe)],
        "volumes": [
            {"name": "code", "configMap": {"name": NAME}},
            {"name": "shm", "emptyDir": shm},
            {"name": "workspace"} | work,
        ],
    }


def _container(platform: Disposable, recipe: Recipe) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": recipe.cluster.image,
        "workingDir": CODE,
        "command": ["bash", "-c", _shell(platform, recipe)],
        "env": _env(platform, recipe),
        "envFrom": [{"secretRef": {"name": NAME}}],
        "resources": _resources(recipe),
        "volumeMounts": [
            {"name": "code", "mountPath": ARCHIVE_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "workspace", "mountPath": "/workspace"},
        ],
    }
    if recipe.site.rdma:  # InfiniBand registers memory, which must not be swapped out
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _shell(platform: Disposable, recipe: Recipe) -> str:
    unpack = f"tar -xzf {ARCHIVE_FOLDER}/{ARCHIVE} || exit {EXIT_CONFIG}\n"
    rank = 'export SPOTRL_NODE_RANK="${JOB_COMPLETION_INDEX:?}"\n' if recipe.cluster.nodes > 1 else ""
    body = script.setup_commands(recipe, EXIT_PREFLIGHT) + script.write_config(recipe)
    text = unpack + rank + platform.begin_shell(recipe) + body + script.keep_commands(recipe)
    text += f"exec {script.node_command(recipe)}\n"
    if "$$" in text or "$(" in text:
        raise ConfigError(
            f"{recipe.name} has $$ or $( in its shell, which Kubernetes would replace: write it otherwise"
        )
    return text


def _env(platform: Disposable, recipe: Recipe) -> list[dict[str, Any]]:
    """The run's id and this node's place, as trainer/node/topology.py reads it; the rest is in the Secret."""
    values = {"RUN_ID": NAME}
    if recipe.uses_bucket and recipe.storage.bucket:
        values["BUCKET"] = recipe.storage.bucket
    notice_s = recipe.site.grace_s
    if platform.uses_spot(recipe):
        notice_s = min(SPOT_NOTICE_S, notice_s)
    values["SPOTRL_NOTICE_S"] = str(notice_s)
    if recipe.cluster.gpus_per_node:
        values["SPOTRL_GPUS_PER_NODE"] = str(recipe.cluster.gpus_per_node)
    if recipe.cluster.nodes > 1:
        values["SPOTRL_NODES"] = str(recipe.cluster.nodes)
        values["SPOTRL_HEAD"] = f"{NAME}-{NODE}-0-0.{NAME}"
    values["SPOTRL_DASHBOARD_HOST"] = "127.0.0.1"  # where `kubectl port-forward` looks for it
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    # Pods of an earlier start may still be going down when those of the next look for their head.
    if recipe.cluster.nodes > 1:
        field = {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}
        env.append({"name": "SPOTRL_RESTART", "valueFrom": {"fieldRef": field}})
    return env


def _resources(recipe: Recipe) -> dict[str, Any]:
    """CPU, memory and disk as planned, so that no pod goes to a node that is too small. Of GPUs and
    InfiniBand devices the limit is the request."""
    cluster = recipe.cluster
    requests = {
        "cpu": str(recipe.cpus),
        "memory": f"{cluster.memory_gib}Gi",
        "ephemeral-storage": f"{pods.own_disk_gib(recipe)}Gi",
    }
    limits: dict[str, int] = {}
    if cluster.gpus_per_node:
        limits["nvidia.com/gpu"] = cluster.gpus_per_node
    limits |= pods.rdma_devices(recipe)
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _placement(platform: Disposable, recipe: Recipe) -> dict[str, Any]:
    """Which nodes the pods may go to: those with the planned GPU, preemptible or not."""
    selector = {"kubernetes.io/arch": "amd64"}  # the locked environments are for it
    if recipe.site.node_pool:
        selector["cloud.google.com/gke-nodepool"] = recipe.site.node_pool
    tolerations = []
    if recipe.cluster.gpus_per_node:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})

    # Of `on_spot` a preemptible node meets one. All other nodes meet all of `never_spot`: those without the
    # label do.
    on_spot: list[list[dict[str, Any]]] = []
    for key, value in SPOT_LABELS.items():
        on_spot.append([{"key": key, "operator": "In", "values": [value]}])
    never_spot = [label | {"operator": "NotIn"} for (label,) in on_spot]

    affinity: dict[str, Any] = {}
    spot = [never_spot]
    if platform.uses_spot(recipe):
        for key, value in SPOT_LABELS.items():
            tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
        spot = on_spot
        if recipe.cluster.spot != "only":
            preferred = [{"weight": 100, "preference": {"matchExpressions": labels}} for labels in on_spot]
            affinity["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
            spot = [[]]

    # A node must meet all conditions of one term: those of a card, and those of a market.
    terms = []
    cards = [[card] for card in _card_labels(platform, recipe)]
    for card in cards or [[]]:
        for market in spot:
            if card or market:
                terms.append({"matchExpressions": [*card, *market]})
    if terms:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    placement: dict[str, Any] = {"nodeSelector": selector, "affinity": {"nodeAffinity": affinity}}
    return placement | ({"tolerations": tolerations} if tolerations else {})


def _card_labels(platform: Disposable, recipe: Recipe) -> list[dict[str, Any]]:
    """Conditions of which a node must meet one: NVIDIA's label of the planned cards, or GKE's. Several nodes
    take the first choice alone, since each could get another card."""
    if not recipe.cluster.gpus_per_node:
        return []
    if recipe.site.gpu_label:
        key, _, value = recipe.site.gpu_label.partition("=")
        return [{"key": key, "operator": "In", "values": [value]}]
    names = platform.cards(recipe)
    single = SINGLE_CARDS if recipe.cluster.gpus_per_node == 1 else {}
    conditions = []
    for label, *tables in ((NVIDIA_LABEL, NVIDIA_CARDS, single), (GKE_LABEL, GKE_CARDS)):
        values = [card for table in tables for name in names for card in table.get(name, ())]
        if values:
            conditions.append({"key": label, "operator": "In", "values": values})
    return conditions


def claim(recipe: Recipe) -> dict[str, Any]:
    """The claim at /workspace, which outlives the pods: models, data and runs are there after a restart."""
    metadata = {"name": recipe.storage.volume}
    if recipe.site.namespace:
        metadata["namespace"] = recipe.site.namespace
    spec: dict[str, Any] = {
        "accessModes": [pods.claim_mode(recipe)],
        "resources": {"requests": {"storage": f"{pods.claim_gib(recipe)}Gi"}},
    }
    if recipe.site.storage_class:
        spec["storageClassName"] = recipe.site.storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _restarts_of_job(recipe: Recipe, container: str) -> dict[str, Any]:
    """Fields of the Job: after which codes its pods are started again, and how often.

    One pod is replaced by its Job, whose deadline then holds for all attempts together. Several pods start
    and end together: the first that ends fails their Job, and the JobSet starts all of them again. Pods that
    sample are restarted each for itself.
    """
    again = restarts.restart_codes(recipe)
    if not again:
        return {"backoffLimit": 0}
    alone = recipe.cluster.nodes == 1
    disrupted = {
        "action": "Ignore" if alone else "Count",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    ended = {
        "action": "FailIndex" if recipe.kind == "sample" else "FailJob",
        "onExitCodes": {"containerName": container, "operator": "NotIn", "values": list(again)},
    }
    policy = {"podFailurePolicy": {"rules": [disrupted, ended]}}
    if recipe.kind == "sample":
        return {"backoffLimitPerIndex": recipe.budget.max_requeues} | policy
    return {"backoffLimit": UNLIMITED if alone else 0} | policy


def _restarts_of_set(recipe: Recipe) -> dict[str, Any]:
    """The JobSet's `failurePolicy`: several nodes are started again together, unless a code or the deadline
    was final. What is no end of a pod counts against `budget.max_requeues`."""
    together = recipe.cluster.nodes > 1 and restarts.restart_codes(recipe)
    final = {
        "name": "endedForGood",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    if not together:
        return {"maxRestarts": 0, "rules": [final]}
    again = {
        "name": "countedByTheRun",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["BackoffLimitExceeded"],
    }
    return {"maxRestarts": recipe.budget.max_requeues, "rules": [final, again]}


def set_name(run_id: str) -> str:
    """The run's id as the name of its JobSet: cut, and still one of a kind, where it is too long."""
    if len(run_id) <= LONGEST_NAME:
        return run_id.rstrip("-")
    return f"{run_id[: LONGEST_NAME - 9]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def of_run(text: str, run_id: str) -> str:
    """A rendered file with the id of a launch, and with its JobSet's name, which may be shorter. Machines
    that sample are launched under an id of their own, so their set needs no other name than that."""
    whole = text.replace(f"value: {NAME}\n", f"value: {run_id}\n")
    return whole.replace(f"{NAME}-sample", NAME).replace(NAME, set_name(run_id))
