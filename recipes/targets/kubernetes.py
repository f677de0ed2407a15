"""Kubernetes without a tool between: a JobSet of one indexed Job, whose pods are the run's nodes.

The code comes in a ConfigMap: packed it takes nine tenths of the 1 MiB that one may hold, kubectl alone
writes it, and a pod unpacks it before it has an environment or any client of a bucket. (A tarball in the
bucket would need such a client in every image, and a git URL would leave out what is not committed, and
private repositories.)

Fields of JobSet v1alpha2 and Kubernetes 1.31.
"""

from __future__ import annotations

import hashlib
from typing import Any

from recipes.capabilities import gpus_for, kept_folder, uses_spot
from recipes.recipe.spec import Recipe
from recipes.targets import restarts, script
from recipes.targets.skypilot import ENVIRONMENT_GIB, to_yaml
from trainer.config import ConfigError, never_sent
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT

NAME = "spotrl-run-id"
"""What stands for the run's id in a rendered file, and for the name of its JobSet, Secret and ConfigMap."""
LONGEST_NAME = 40
"""Characters of a JobSet's name: those of its pods have up to 23 more, and 63 is the limit."""
CODE = "/spotrl"
"""Where the repository stands in the container."""
ARCHIVE, ARCHIVE_FOLDER = "code.tar.gz", "/etc/spotrl"
"""Key of the ConfigMap that holds the code, and where that is mounted."""
TOKENS = "$HOME/.spotrl/tokens.env"
"""File with tokens that the head of a rendered file names: no place of the repository, which is sent."""
LEFT_OUT = (
    "tests",
    "docs",
    "benchmarks",
    "runs",
    "recipes/commands",
    "recipes/drivers",
    "recipes/generated",
    "recipes/screens",
    "recipes/targets",
    "CHANGELOG.md",
    "requirements/launch.txt",
    "requirements/test.txt",
    "__pycache__",
    "code.tar",
    ARCHIVE,
)
"""Files and folders that no node needs, locks of other environments among them, besides hidden ones and those
of `never_sent`."""
CHECKS = ("tests/conftest.py", "tests/families.py", "tests/servers.py", "tests/gpu", "tests/learning")
"""What a check of a card needs of it all the same."""
CONTAINER, NODE = "spotrl", "node"
"""Name of the container, and of the JobSet's one Job."""
KEPT_S = 3 * 24 * 3600
"""Seconds until a JobSet that has ended is removed, and the tokens and the code with it."""
SPOT_NOTICE_S = 15
"""Seconds that a pod has on a spot node of GKE; elsewhere it is site.grace_s."""
KIND = "jobsets.jobset.x-k8s.io"
"""JobSets, as kubectl takes the word."""
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
    "L4": ("nvidia-l4",),
    "A100": ("nvidia-tesla-a100",),
    "A100-80GB": ("nvidia-a100-80gb",),
    "H100": ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    "H200": ("nvidia-h200-141gb",),
    "B200": ("nvidia-b200",),
}
"""GKE's node label, and its values by our names."""
NVIDIA_LABEL = "nvidia.com/gpu.product"
NVIDIA_CARDS = {
    "L4": ("NVIDIA-L4",),
    "L40S": ("NVIDIA-L40S",),
    "A100": ("NVIDIA-A100-SXM4-40GB",),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB",),
    "H100": ("NVIDIA-H100-80GB-HBM3",),
    "H200": ("NVIDIA-H200",),
    "B200": ("NVIDIA-B200",),
}
"""The node label of NVIDIA's GPU feature discovery, and its values by our names."""
SINGLE_CARDS = {
    "A100": ("NVIDIA-A100-PCIE-40GB",),
    "A100-80GB": ("NVIDIA-A100-80GB-PCIe",),
    "H100": ("NVIDIA-H100-PCIe",),
}
"""Cards without NVLink, which do where a node has one."""


def render(recipe: Recipe, target: str) -> dict[str, str]:
    """The JobSet and, where the recipe names a volume, its claim."""
    job_set = to_yaml(_job_set(recipe, target), _head(recipe, target))
    files = {f"{recipe.name}.yaml": job_set}
    if recipe.storage.volume:
        files[f"{recipe.name}.volume.yaml"] = to_yaml(
            _claim(recipe), "The claim at /workspace; once, before the run."
        )
    return files


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


def kubectl(recipe: Recipe, flags: list[str]) -> list[str]:
    """kubectl with what it takes to find the recipe's cluster and namespace. flags: after `--` at the
    launch."""
    site = recipe.site
    context = ["--context", site.kubernetes_context] if site.kubernetes_context else []
    namespace = ["--namespace", site.namespace] if site.namespace else []
    return ["kubectl", *context, *namespace, *flags]


def _head(recipe: Recipe, target: str) -> str:
    path = f"recipes/generated/{target}/{recipe.name}"
    program = " ".join(kubectl(recipe, []))
    tokens = script.API_KEY if recipe.kind == "serve" else "HF_TOKEN, AWS_ACCESS_KEY_ID"
    if recipe.uses_bucket and not recipe.storage.bucket:
        tokens += ", BUCKET"
    secrets = f"--exclude-from={never_sent.IN_TREE}"
    tar = f"tar -cf code.tar {secrets} {' '.join(f'--exclude={name}' for name in LEFT_OUT)} *"
    tar += f" && tar -rf code.tar {secrets} {' '.join(CHECKS)}" if recipe.kind == "check" else ""
    lines = [
        script.written_by(recipe, target),
        f"  {tar} && gzip -f code.tar",
        f"  {program} create configmap try-1 --from-file={ARCHIVE}",
        f"  {program} create secret generic try-1 --from-env-file={TOKENS}    # NAME=value: {tokens}, ...",
        *([f"  {program} apply -f {path}.volume.yaml"] if recipe.storage.volume else []),
        f"  sed s/{NAME}/try-1/g {path}.yaml | {program} create -f -",
        f"The cluster needs the JobSet controller. A name has at most {LONGEST_NAME} characters.",
        script.run_id_comment(recipe),
    ]
    return "\n".join(lines)


def _job_set(recipe: Recipe, target: str) -> dict[str, Any]:
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
        **restarts.kubernetes_job(recipe, CONTAINER),
        "template": {"metadata": {"labels": labels}, "spec": _pod(recipe, target)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": restarts.kubernetes_set(recipe),
            "ttlSecondsAfterFinished": KEPT_S,
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(recipe: Recipe, target: str) -> dict[str, Any]:
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
        **_placement(recipe, target),
        "containers": [_container(recipe, target)],
        "volumes": [
            {"name": "code", "configMap": {"name": NAME}},
            {"name": "shm", "emptyDir": shm},
            {"name": "workspace"} | work,
        ],
    }


def _container(recipe: Recipe, target: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": recipe.cluster.image,
        "workingDir": CODE,
        "command": ["bash", "-c", _shell(recipe, target)],
        "env": _env(recipe, target),
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


def _shell(recipe: Recipe, target: str) -> str:
    begin = script.preamble(
        recipe,
        "/workspace",
        asks_bucket=recipe.uses_bucket,
        data=script.data_directory(recipe),
        kept_folder=kept_folder(recipe, target),
    )
    unpack = f"tar -xzf {ARCHIVE_FOLDER}/{ARCHIVE} || exit {EXIT_CONFIG}\n"
    rank = 'export SPOTRL_NODE_RANK="${JOB_COMPLETION_INDEX:?}"\n' if recipe.cluster.nodes > 1 else ""
    body = script.setup_commands(recipe, EXIT_PREFLIGHT) + script.write_config(recipe)
    text = unpack + rank + begin + body + script.keep_commands(recipe)
    text += f"exec {script.node_command(recipe)}\n"
    if "$$" in text or "$(" in text:
        raise ConfigError(
            f"{recipe.name} has $$ or $( in its shell, which Kubernetes would replace: write it otherwise"
        )
    return text


def _env(recipe: Recipe, target: str) -> list[dict[str, Any]]:
    """The run's id and this node's place, as trainer/node/topology.py reads it; the rest is in the Secret."""
    values = {"RUN_ID": NAME}
    if recipe.uses_bucket and recipe.storage.bucket:
        values["BUCKET"] = recipe.storage.bucket
    notice_s = recipe.site.grace_s
    if uses_spot(recipe, target):
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
    disk_gib = ENVIRONMENT_GIB if recipe.storage.volume else cluster.disk_gib
    requests = {
        "cpu": str(recipe.cpus),
        "memory": f"{cluster.memory_gib}Gi",
        "ephemeral-storage": f"{disk_gib}Gi",
    }
    limits: dict[str, int] = {}
    if cluster.gpus_per_node:
        limits["nvidia.com/gpu"] = cluster.gpus_per_node
    if recipe.site.rdma:
        name, _, count = recipe.site.rdma.rpartition(":")
        limits[name] = int(count)
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _placement(recipe: Recipe, target: str) -> dict[str, Any]:
    """Which nodes the pods may go to: those with the planned GPU, preemptible or not."""
    selector = {"kubernetes.io/arch": "amd64"}  # the locked environments are for it
    if recipe.site.node_pool:
        selector["cloud.google.com/gke-nodepool"] = recipe.site.node_pool
    tolerations = []
    if recipe.cluster.gpus_per_node:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})

    # Of `on_spot` a preemptible node meets one. All other nodes meet all of `never_spot`: those without the
    # label do.
    preferred = []
    on_spot = []
    never_spot = []
    for key, value in SPOT_LABELS.items():
        label: dict[str, Any] = {"key": key, "operator": "In", "values": [value]}
        preferred.append({"weight": 100, "preference": {"matchExpressions": [label]}})
        on_spot.append([label])
        never_spot.append(label | {"operator": "NotIn"})

    affinity: dict[str, Any] = {}
    spot: list[list[dict[str, Any]]] = [[]]
    if not uses_spot(recipe, target):
        spot = [never_spot]
    else:
        for key, value in SPOT_LABELS.items():
            tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
        if recipe.cluster.spot == "only":
            spot = on_spot
        else:
            affinity["preferredDuringSchedulingIgnoredDuringExecution"] = preferred

    # A node must meet all conditions of one term: those of a card, and those of a market.
    terms = []
    cards = [[card] for card in _cards(recipe, target)]
    for card in cards or [[]]:
        for market in spot:
            if card or market:
                terms.append({"matchExpressions": [*card, *market]})
    if terms:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    placement: dict[str, Any] = {"nodeSelector": selector, "affinity": {"nodeAffinity": affinity}}
    return placement | ({"tolerations": tolerations} if tolerations else {})


def _cards(recipe: Recipe, target: str) -> list[dict[str, Any]]:
    """Conditions of which a node must meet one: NVIDIA's label of the planned cards, or GKE's. Several nodes
    take the first choice alone, since each could get another card."""
    if not recipe.cluster.gpus_per_node:
        return []
    if recipe.site.gpu_label:
        key, _, value = recipe.site.gpu_label.partition("=")
        return [{"key": key, "operator": "In", "values": [value]}]
    names = gpus_for(recipe, target)
    if recipe.cluster.nodes > 1:
        names = names[:1]
    found = []
    for label, cards in ((NVIDIA_LABEL, NVIDIA_CARDS), (GKE_LABEL, GKE_CARDS)):
        values: list[str] = []
        for name in names:
            values += cards.get(name, ())
        if label == NVIDIA_LABEL and recipe.cluster.gpus_per_node == 1:
            for name in names:
                values += SINGLE_CARDS.get(name, ())
        if values:
            found.append({"key": label, "operator": "In", "values": values})
    return found


def _claim(recipe: Recipe) -> dict[str, Any]:
    """The claim at /workspace, which outlives the pods: models, data and runs are there after a restart."""
    size = recipe.storage.volume_gib or recipe.cluster.disk_gib
    mode = "ReadWriteMany" if recipe.cluster.nodes > 1 else "ReadWriteOnce"
    metadata = {"name": recipe.storage.volume}
    if recipe.site.namespace:
        metadata["namespace"] = recipe.site.namespace
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": f"{size}Gi"}}}
    if recipe.site.storage_class:
        spec["storageClassName"] = recipe.site.storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
