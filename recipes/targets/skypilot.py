"""SkyPilot task files: `sky launch` on demand, `sky jobs launch` for spot. Checked against SkyPilot 0.14.1.

What shapes them: RunPod runs one node and has no FUSE, so nothing is mounted and checkpoints go up by our own
uploader; SkyPilot's ids change on recovery, so checkpoints are keyed by RUN_ID; rclone's cached mounts upload
in any order and may lose their tail on `down` (skypilot#8519), so no checkpoint is ever committed through
one.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from recipes.capabilities import (
    CAPABILITIES,
    capability,
    engine_gpu,
    gpus_for,
    is_managed,
    kept_folder,
    refusal,
    sky_targets,
)
from recipes.plan import cost
from recipes.recipe.spec import ASKED_BUCKET, Recipe
from recipes.targets import restarts, script
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_PREFLIGHT

ENVIRONMENT_GIB = 60
"""Size of a pod's own disk where a claim holds models, data and runs: it has the environment, the repository
and Ray's files."""


class Dumper(yaml.SafeDumper):
    """Shell blocks as blocks, no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


Dumper.add_representer(str, _text)


def to_yaml(data: dict[str, Any], head: str = "") -> str:
    """YAML with a comment above it."""
    comment = "".join(f"# {line}\n" if line else "#\n" for line in head.splitlines())
    return comment + yaml.dump(data, Dumper=Dumper, sort_keys=False, width=1000)


def job_name(recipe: Recipe) -> str:
    """The recipe's name as platforms take it: no dots."""
    return recipe.name.replace(".", "-")


def render(recipe: Recipe, target: str) -> dict[str, str]:
    """Task file, and the volume's where the recipe names one."""
    can = capability(target)
    task: dict[str, Any] = {
        "name": job_name(recipe),
        "workdir": ".",
        "num_nodes": recipe.cluster.nodes,
        "resources": _resources(recipe, target),
        "envs": _envs(recipe, target),
        "secrets": dict.fromkeys(script.secret_names(recipe), ""),
    }
    if recipe.storage.volume:
        task["volumes"] = {"/workspace": recipe.storage.volume}
    if recipe.storage.mount:
        cached = {"source": script.bucket_of(recipe) or ASKED_BUCKET, "mode": "MOUNT_CACHED"}
        task["file_mounts"] = {recipe.storage.mount: cached}
    if can.cloud == "kubernetes":
        queue = {"kueue": {"local_queue_name": recipe.site.queue}} if recipe.site.queue else {}
        task["config"] = {"kubernetes": {"provision_timeout": 900, **queue, "pod_config": _pod(recipe)}}
    elif recipe.cluster.nodes > 1 and "skypilot-gcp" in cost.target_members(recipe, target):
        # GCP's older interface stays below 50 Gb/s, and SkyPilot takes that unless it is told.
        task["config"] = {"gcp": {"enable_gvnic": True}}
    work = "/workspace" if can.cloud == "runpod" or recipe.storage.volume else "$HOME/spotrl"
    begin = script.preamble(
        recipe,
        work,
        asks_bucket=recipe.uses_bucket,
        data=script.data_directory(recipe),
        kept_folder=kept_folder(recipe, target),
    )
    task["setup"] = begin + script.setup_commands(recipe, EXIT_PREFLIGHT)
    check = script.driver_check(recipe, EXIT_PREFLIGHT)
    ready = script.leave_if_over(recipe) + check + script.write_config(recipe) + script.keep_commands(recipe)
    task["run"] = begin + ready + f"exec {script.node_command(recipe, '0.0.0.0')}\n"
    name = f"{recipe.name}.yaml"
    files = {name: to_yaml(task, _head(recipe, target, f"recipes/generated/{target}/{name}"))}
    if recipe.storage.volume and can.cloud in ("runpod", "kubernetes"):
        files[f"{recipe.name}.volume.yaml"] = _volume(recipe) if can.cloud == "runpod" else _claim(recipe)
    return files


def _head(recipe: Recipe, target: str, path: str) -> str:
    bucket = "" if recipe.storage.bucket or not recipe.uses_bucket else " --env BUCKET=s3://..."
    command = "sky jobs launch" if is_managed(recipe, target) else "sky launch"
    begin = end = ""
    if recipe.kind == "sample":
        own_name = "-n" if is_managed(recipe, target) else "-c"
        begin = f"for i in $(seq {recipe.jobs}); do "
        command, end = f"{command} -y -d {own_name} {job_name(recipe)}-$i", "; done"
    url = recipe.storage.bucket or recipe.storage.weights or ("s3://" if recipe.uses_bucket else "")
    needs = script.bucket_keys(url)
    if url.startswith("gs://") and capability(target).cloud == "gcp":
        needs = ()  # the machines' own account
    needs += tuple(name for name in (script.API_KEY, script.FLEET_KEY) if name in script.secret_names(recipe))
    secrets = "".join(f" --secret {name}" for name in needs)
    return (
        f"{script.written_by(recipe, target)}\n"
        f"  {begin}{command} {path} --env RUN_ID=my-run{bucket}{secrets}{end}\n"
        f"{script.run_id_comment(recipe)}"
    )


def _envs(recipe: Recipe, target: str) -> dict[str, str | None]:
    envs: dict[str, str | None] = {
        "RUN_ID": None,
        "BUCKET": recipe.storage.bucket or (None if recipe.uses_bucket else ""),
    }
    return envs | dict.fromkeys(script.SETTINGS, "")


def _resources(recipe: Recipe, target: str) -> dict[str, Any]:
    cluster = recipe.cluster
    budget = recipe.budget
    can = capability(target)
    common: dict[str, Any] = {
        "image_id": f"docker:{cluster.image}",
        "memory": f"{cluster.memory_gib}+",
        "disk_size": cluster.disk_gib,
        "autostop": _autostop(recipe, target),
        "job_recovery": restarts.sky_recovery(recipe),
    }
    if recipe.kind == "serve":  # Ray's dashboard goes through ssh: a port here is open to the internet
        common["ports"] = [script.PORT]
    if cluster.cpus or not cluster.gpus_per_node or can.cloud == "kubernetes":
        common = {"cpus": f"{recipe.cpus}+"} | common
    if budget.max_hourly_usd:
        common["max_hourly_cost"] = budget.max_hourly_usd
    if can.cloud == "kubernetes":
        del common["disk_size"]  # pods have their node's disk, or the claim
    choices = _choices(recipe, target)
    if len(choices) == 1:
        return choices[0] | common
    return {"ordered": choices} | common


def _autostop(recipe: Recipe, target: str) -> dict[str, Any]:
    """When machines without a job go down. SkyPilot takes 0 minutes for 1; an open ssh session, which is also
    that of `launch.py dashboard`, would keep a cluster, so only jobs count."""
    if is_managed(recipe, target):
        return {"idle_minutes": recipe.budget.idle_minutes, "down": True}
    return {"idle_minutes": recipe.budget.keep_minutes, "wait_for": "jobs", "down": True}


def _choices(recipe: Recipe, target: str) -> list[dict[str, Any]]:
    """Places to try, in order of what the run is expected to cost there, preemptions and restarts included
    (what trains nothing: per hour); then those whose price or memory is not known, spot before on-demand."""
    names = cost.target_members(recipe, target)
    if not names:
        clouds = sky_targets(recipe)
        raise ConfigError(f"no cloud of site.clouds can run {recipe.name}: {refusal(recipe, clouds[0])}")
    expected = {
        (o.target, o.gpu, o.spot): o.usd for o in cost.offers(recipe, targets=names) if o.usd is not None
    }
    if recipe.kind != "train":
        expected = {
            (name, gpu, spot): usd for name in names for usd, gpu, spot in cost.node_prices(recipe, name)
        }
    found: list[tuple[float, bool, int, dict[str, Any]]] = []
    for name in names:
        for gpu in gpus_for(recipe, name) if recipe.cluster.gpus_per_node else [""]:
            for spot in cost.markets(recipe, name):
                entry = _place(recipe, name, gpu) | (
                    {"use_spot": spot} if CAPABILITIES[name].spot and gpu else {}
                )
                found.append((expected.get((name, gpu, spot), math.inf), not spot, len(found), entry))
    return [entry for *_, entry in sorted(found, key=lambda f: f[:3])]


def _place(recipe: Recipe, target: str, gpu: str) -> dict[str, Any]:
    can, site = CAPABILITIES[target], recipe.site
    where = site.kubernetes_context if can.cloud == "kubernetes" else site.region
    cloud = "k8s" if can.cloud == "kubernetes" else can.cloud
    entry: dict[str, Any] = {"infra": f"{cloud}/{where}" if where else cloud}
    if gpu:
        entry["accelerators"] = (
            f"{engine_gpu(target, gpu, recipe.cluster.gpus_per_node)}:{recipe.cluster.gpus_per_node}"
        )
    whole = recipe.cluster.gpus_per_node == 8 or can.cloud == "kubernetes"
    if recipe.cluster.nodes > 1 and whole and gpu in can.fast:
        entry["network_tier"] = "best"
    return entry


def _pod(recipe: Recipe) -> dict[str, Any]:
    """What is merged into SkyPilot's own pod, lists by name: `dshm` is its memory volume at /dev/shm."""
    site = recipe.site
    memory = {"medium": "Memory", "sizeLimit": f"{recipe.cluster.shm_gib}Gi"}
    spec: dict[str, Any] = {"volumes": [{"name": "dshm", "emptyDir": memory}]}
    # Else pods go to nodes whose disk is too small, and are evicted amid training. With a claim the data are
    # there.
    disk = ENVIRONMENT_GIB if recipe.storage.volume else recipe.cluster.disk_gib
    requests: dict[str, Any] = {"ephemeral-storage": f"{disk}Gi"}
    resources = {"requests": requests}
    container: dict[str, Any] = {"resources": resources}
    if recipe.cluster.nodes > 1:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if site.rdma:
        name, _, count = site.rdma.rpartition(":")
        resources["limits"] = {name: int(count)}
        requests[name] = int(count)
    spec = {"containers": [container]} | spec
    if site.node_pool:
        spec["nodeSelector"] = {"cloud.google.com/gke-nodepool": site.node_pool}
    return {"spec": spec}


def _claim(recipe: Recipe) -> str:
    """The claim at /workspace, which outlives the pods: models, data and packages are there after a
    recovery."""
    size = str(recipe.storage.volume_gib or recipe.cluster.disk_gib)
    where = f"k8s/{recipe.site.kubernetes_context}" if recipe.site.kubernetes_context else "k8s"
    data: dict[str, Any] = {"name": recipe.storage.volume, "type": "k8s-pvc", "infra": where, "size": size}
    data["config"] = {"access_mode": "ReadWriteMany" if recipe.cluster.nodes > 1 else "ReadWriteOnce"}
    if recipe.site.storage_class:
        data["config"]["storage_class_name"] = recipe.site.storage_class
    return to_yaml(data, f"The claim at /workspace; once: sky volumes apply {recipe.name}.volume.yaml")


def _volume(recipe: Recipe) -> str:
    if len(recipe.storage.volume) > 30:
        raise ConfigError(f"storage.volume {recipe.storage.volume!r}: RunPod takes at most 30 characters")
    if "/" not in recipe.site.region:
        raise ConfigError("a RunPod volume lives in one data centre: set site.region, for example US/US-KS-2")
    size = str(recipe.storage.volume_gib or recipe.cluster.disk_gib)
    data = {
        "name": recipe.storage.volume,
        "type": "runpod-network-volume",
        "infra": f"runpod/{recipe.site.region}",
        "size": size,
    }
    return to_yaml(data, f"The volume at /workspace; once: sky volumes apply {recipe.name}.volume.yaml")
