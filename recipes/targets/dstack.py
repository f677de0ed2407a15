"""dstack files: a task, the fleet that it runs on, and the volume where the recipe names one. Checked against
0.22.5.

What shapes them: a node lost on RunPod, Kubernetes or own machines counts as `error`, not as `interruption`,
so both are retried; several nodes need a fleet with `placement: cluster`; commands are joined with && unless
one block.
"""

from __future__ import annotations

import hashlib
from typing import Any

from recipes.capabilities import (
    capability,
    engine_gpu,
    gpus_for,
    kept_folder,
    price_market,
    price_variant,
    uses_spot,
)
from recipes.plan.prices import gpu_price
from recipes.recipe.spec import Recipe
from recipes.targets import restarts, script
from recipes.targets.skypilot import job_name, to_yaml
from recipes.targets.ssh import hosts_of, parse_address
from trainer.config import ConfigError
from trainer.hardware.gpus import gpu_named
from trainer.system.exit_codes import EXIT_PREFLIGHT

RUNPOD_CARDS = {
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "A100-80GB": "NVIDIA A100 80GB PCIe",
    "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB",
    "H100-SXM": "NVIDIA H100 80GB HBM3",
    "H200-SXM": "NVIDIA H200",
    "B200": "NVIDIA B200",
}
"""RunPod's own names, which dstack takes for instance types, by SkyPilot's."""
LONGEST_NAME = 36
"""Characters of a task's name: dstack's 41, less what a fleet's name has behind it."""
CODE = "/spotrl"
"""Where the repository stands in the container."""
PARTS = ("", "data_prep", "trainer/checkpoint", "trainer/fleet", "trainer/node", "trainer/rewards/grading")
"""The repository in uploads: one is 2 MB at most, and `.dstackignore` leaves the others out of the first."""
CHECKS = (
    "recipes/gpu_check.py",
    "recipes/capabilities.py",
    "recipes/recipe/recipe_files.py",
    "recipes/plan",
    "recipes/presets",
    "tests/conftest.py",
    "tests/families.py",
    "tests/servers.py",
    "tests/gpu",
    "tests/learning",
)
"""What a check of a card needs besides, left out of the first too."""


def render(recipe: Recipe, target: str) -> dict[str, str]:
    """Task, fleet and, where the recipe names one, volume."""
    name = _task_name(recipe)
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"dstack takes names of up to {LONGEST_NAME} characters here, and {name} has {len(name)}: "
            "rename the recipe"
        )
    files = {
        f"{recipe.name}.yaml": to_yaml(_task(recipe, target, name), _head(recipe, target)),
        f"{recipe.name}.fleet.yaml": to_yaml(
            _fleet(recipe, target, name), "The machines; once, before the task."
        ),
    }
    if recipe.storage.volume:
        files[f"{recipe.name}.volume.yaml"] = to_yaml(
            _volume(recipe, target), "The volume; once, before the fleet."
        )
    return files


def _task_name(recipe: Recipe) -> str:
    """The task's name. That of a sampling machine is cut, where the run's own name is almost as long as one
    can be."""
    name = job_name(recipe)
    if recipe.kind != "sample" or len(name) <= LONGEST_NAME:
        return name
    run = job_name(recipe).removesuffix("-sample")
    return f"{run[:20].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:4]}-sample"


def fleet_name(target: str, name: str) -> str:
    """One fleet per recipe and cloud."""
    return f"{name}-{target.partition('-')[2].replace('kubernetes', 'k8s').replace('runpod', 'rp')}"


def _head(recipe: Recipe, target: str) -> str:
    folder = f"recipes/generated/{target}/{recipe.name}"
    apply = f"dstack apply -f {folder}.yaml -e RUN_ID=my-run"
    if recipe.uses_bucket and not recipe.storage.bucket:
        apply += " -e BUCKET=s3://..."
    for name in given_secrets(recipe):
        apply += f" -e {name}"
    if recipe.kind == "sample":
        each = apply.replace("apply", f"apply -y -d -n {_task_name(recipe)}-$i")
        apply = f"for i in $(seq {recipe.jobs}); do {each}; done"

    lines = [script.written_by(recipe, target)]
    for name in secrets(recipe, target):
        lines.append(f"  dstack secret set {name.lower()} ...")
    lines.append(f"  dstack apply -f {folder}.fleet.yaml")
    lines.append(f"  {apply}")
    lines.append(script.run_id_comment(recipe))
    return "\n".join(lines)


def secrets(recipe: Recipe, target: str) -> tuple[str, ...]:
    """Tokens that the task takes from dstack's own secrets, which have these names in lower case.

    A secret that the task names and the server does not have ends the run, once the machines are there: no
    others.
    """
    if not recipe.uses_bucket and not recipe.storage.weights:
        return ()
    default = "gs" if capability(target).cloud == "gcp" else "s3"
    names = script.bucket_keys(recipe.storage.bucket or recipe.storage.weights or f"{default}://")
    online = recipe.config.logging.wandb == "online" and recipe.kind != "sample"
    return names + (("WANDB_API_KEY",) if online else ())


def given_secrets(recipe: Recipe) -> tuple[str, ...]:
    """Secrets of the launch itself, whose values dstack's client takes from its environment."""
    used = script.secret_names(recipe)
    return tuple(name for name in (script.API_KEY, script.FLEET_KEY) if name in used)


def _task(recipe: Recipe, target: str, name: str) -> dict[str, Any]:
    budget, can = recipe.budget, capability(target)
    task: dict[str, Any] = {
        "type": "task",
        "name": name,
        "nodes": recipe.cluster.nodes,
        "fleets": [fleet_name(target, name)],
        "image": recipe.cluster.image,
        "user": "root",
        "shell": "bash",
        "working_dir": CODE,
        "files": [_file(path) for path in (*PARTS, *(CHECKS if recipe.kind == "check" else ()))],
        "env": _env(recipe, target),
        **({"ports": [script.PORT]} if recipe.kind == "serve" else {}),
        "resources": _resources(recipe, target),
    }
    if can.cloud:
        task |= _market(recipe, target) | {"idle_duration": _idle(recipe)}
    if recipe.storage.volume:
        task["volumes"] = [{"name": recipe.storage.volume, "path": "/workspace"}]
    task |= {
        "retry": restarts.dstack_retry(recipe),
        "max_duration": restarts.duration(budget.max_hours),
        "stop_duration": "5m",
        "startup_order": "master-first",
        "stop_criteria": "master-done",
    }
    if recipe.cluster.gpus_per_node and recipe.kind != "serve":
        task["utilization_policy"] = {"min_gpu_utilization": 5, "time_window": "1h"}
    begin = script.preamble(
        recipe,
        "/workspace",
        asks_bucket=recipe.uses_bucket,
        data=script.data_directory(recipe),
        kept_folder=kept_folder(recipe, target),
    )
    body = begin + script.setup_commands(recipe, EXIT_PREFLIGHT) + script.write_config(recipe)
    body += script.keep_commands(recipe)
    task["commands"] = [restarts.dstack_command(recipe, body)]
    return task


def _idle(recipe: Recipe) -> str:
    """How long a machine without a job costs on. dstack submits a failed job again after 15 seconds, and then
    after 30 and 60 more."""
    waits = bool(restarts.restart_codes(recipe))
    return f"{recipe.budget.idle_minutes if waits else recipe.budget.keep_minutes}m"


def _file(path: str) -> dict[str, str]:
    """A folder or file of the repository, as seen from the rendered file."""
    return {"local_path": f"../../../{path}".rstrip("/"), "path": f"{CODE}/{path}".rstrip("/")}


def _env(recipe: Recipe, target: str) -> list[str]:
    env = ["RUN_ID"]
    if recipe.uses_bucket:
        # A name without a value is asked for at the launch.
        env.append(f"BUCKET={recipe.storage.bucket}" if recipe.storage.bucket else "BUCKET")
    env += given_secrets(recipe)
    for key in secrets(recipe, target):
        env.append(f"{key}=${{{{ secrets.{key.lower()} }}}}")
    return env


def _resources(recipe: Recipe, target: str) -> dict[str, Any]:
    cluster, can = recipe.cluster, capability(target)
    cpus = recipe.cpus if cluster.cpus or not cluster.gpus_per_node else 8 * cluster.gpus_per_node
    resources: dict[str, Any] = {
        "cpu": f"x86:{cpus}..",
        "memory": f"{cluster.memory_gib}GB..",
        "shm_size": f"{cluster.shm_gib}GB",
        "disk": f"{cluster.disk_gib}GB..",
    }
    if cluster.gpus_per_node:
        mine = _cards(recipe, target)
        least = min(gpu_named(gpu).memory_gib for gpu in mine)
        resources["gpu"] = {
            "vendor": "amd" if cluster.gpu.startswith("MI") else "nvidia",
            "name": list(dict.fromkeys(can.gpus[gpu] for gpu in mine)),
            "memory": f"{int(least)}GB..",
            "count": cluster.gpus_per_node,
        }
    return resources


def _cards(recipe: Recipe, target: str) -> list[str]:
    """GPUs that the file asks for. Several nodes take the first choice alone, since each could get another
    card."""
    found = gpus_for(recipe, target)
    return found[:1] if recipe.cluster.nodes > 1 else found


def _market(recipe: Recipe, target: str) -> dict[str, Any]:
    can, site = capability(target), recipe.site
    backend = {"runpod-cluster": "runpod"}.get(can.cloud, can.cloud)
    where: dict[str, Any] = {"backends": [backend]}
    if site.region:
        where["regions"] = [site.region]
    if forms := _forms(recipe, target):
        where["instance_types"] = forms
    if uses_spot(recipe, target):
        where["spot_policy"] = "spot" if recipe.cluster.spot == "only" else "auto"
    else:
        where["spot_policy"] = "on-demand"
    limit = _max_price(recipe, target)
    if limit:
        where["max_price"] = limit
    return where


def _forms(recipe: Recipe, target: str) -> list[str]:
    """RunPod's names of the cards that were planned: `gpu: name` alone takes PCIe cards too."""
    count = recipe.cluster.gpus_per_node
    if capability(target).cloud != "runpod-cluster" or not count:
        return []
    cards = []
    for gpu in _cards(recipe, target):
        cards.append(RUNPOD_CARDS[engine_gpu("skypilot-runpod", gpu, count)])
    return cards


def _max_price(recipe: Recipe, target: str) -> float:
    """Dollars per node and hour: the recipe's, else one and a half times the dearest known price."""
    if recipe.budget.max_hourly_usd:
        return recipe.budget.max_hourly_usd
    dearest = 0.0
    for gpu in _cards(recipe, target):
        known = gpu_price(price_market(recipe, target), gpu, variant=price_variant(recipe, target, gpu))
        if known is not None:
            dearest = max(dearest, known.on_demand)
    return round(1.5 * dearest * recipe.cluster.gpus_per_node, 2)


def _fleet(recipe: Recipe, target: str, name: str) -> dict[str, Any]:
    can = capability(target)
    cluster = recipe.cluster
    site = recipe.site
    fleet: dict[str, Any] = {"type": "fleet", "name": fleet_name(target, name)}
    if cluster.nodes > 1:
        fleet["placement"] = "cluster"
    if not can.cloud:
        user = ""
        hosts = []
        for host in hosts_of(recipe):
            login, at, machine = parse_address(host)[0].rpartition("@")
            if at and not user:
                user = login
            hosts.append(machine)
        user = user or "ubuntu"
        return fleet | {
            "ssh_config": {"user": user, "identity_file": site.ssh_key or "~/.ssh/id_ed25519", "hosts": hosts}
        }
    fleet |= {
        "nodes": f"0..{cluster.nodes * recipe.jobs}",
        "resources": _resources(recipe, target),
    } | _market(recipe, target)
    return fleet | {"idle_duration": _idle(recipe)}


def _volume(recipe: Recipe, target: str) -> dict[str, Any]:
    cloud = {"runpod-cluster": "runpod"}.get(capability(target).cloud, capability(target).cloud)
    if not cloud:
        raise ConfigError(
            f"{target} runs on your machines: mount the volume there and leave storage.volume empty"
        )
    if not recipe.site.region and cloud != "kubernetes":
        raise ConfigError("a volume lives in one region: set site.region, for example US-KS-2 on RunPod")
    size = recipe.storage.volume_gib or recipe.cluster.disk_gib
    where = {"region": recipe.site.region} if recipe.site.region else {}
    return {"type": "volume", "name": recipe.storage.volume, "backend": cloud} | where | {"size": f"{size}GB"}
