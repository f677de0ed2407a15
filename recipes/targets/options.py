"""Which target obeys which option of `cluster`, `budget`, `site` and `storage`. An option that would do
nothing is refused where the files are written, with the targets that obey it: a limit that nobody holds is
worse than none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from recipes.capabilities import (
    CAPABILITIES,
    DISPOSABLE,
    Capability,
    capability,
    is_managed,
    nearest_targets,
    refusal,
)
from recipes.presets import RECIPES
from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe
from recipes.targets import restarts
from trainer.config import ConfigError

SECTIONS = ("cluster", "budget", "site", "storage")
OF_GROUP = ("partition", "constraint", "gres", "node_pool")
"""Options of `site` that the second group has for itself."""
OF_THE_RUN = ("site.constraint", "site.gres", "site.node_pool", "site.hosts", "site.rdma", "storage.volume",
              "storage.volume_gib", "storage.mount")  # fmt: skip
"""Options that the second group does not take over from the run's own machines
(`sample_group.sampling_machines`)."""


def is_obeyed(recipe: Recipe, target: str, option: str) -> bool:
    """Whether the target does what an option says: `budget.idle_minutes`. Options that are not named here
    have their effect everywhere: in the plan, in what the target can run, or in the run's configuration,
    which the head obeys."""
    can = capability(target)
    slurm = can.platform == "sbatch"
    batch = slurm or can.platform == "qsub"
    disposable = can.platform in DISPOSABLE
    pods = can.cloud == "kubernetes" and can.platform in ("kubectl", "sky")
    job_set = can.platform == "kubectl"
    ssh = target in ("ssh", "dstack-ssh")
    match option:
        case "cluster.cpus" | "cluster.memory_gib":
            return disposable or batch
        case "cluster.disk_gib":
            return disposable
        case "cluster.shm_gib":
            return pods or can.platform == "dstack"
        case "cluster.image":
            return disposable or (slurm and recipe.site.container != "")
        case "budget.max_hourly_usd":
            return _sold(can, target)
        case "budget.max_requeues":
            counted = recipe.cluster.nodes > 1 or recipe.kind == "sample"  # one pod: the run counts
            return batch or (job_set and counted and bool(restarts.restart_codes(recipe)))
        case "budget.idle_minutes":
            waits = can.platform == "dstack" and bool(can.cloud) and bool(restarts.restart_codes(recipe))
            return waits or is_managed(recipe, target)
        case "budget.keep_minutes":
            if can.platform == "dstack":
                return bool(can.cloud) and not restarts.restart_codes(recipe)
            return can.platform == "sky" and not is_managed(recipe, target)
        case "site.clouds":
            return target == "skypilot"
        case "site.region":
            return _sold(can, target)
        case "site.kubernetes_context" | "site.node_pool" | "site.queue" | "site.rdma":
            return pods
        case "site.namespace" | "site.gpu_label":
            return job_set
        case "site.topology":  # pods that stand together
            return job_set and recipe.cluster.nodes > 1
        case "site.storage_class":
            return pods and recipe.storage.volume != ""
        case "site.hosts" | "site.ssh_key":
            return ssh
        case "site.shared_dir":
            return batch or target == "ssh"
        case "site.partition" | "site.account" | "site.walltime_hours" | "site.offline":
            return batch
        case "site.qos" | "site.constraint" | "site.reservation" | "site.gres" | "site.container":
            return slurm
        case "site.pbs":
            return can.platform == "qsub"
        case "site.grace_s":
            return slurm or job_set
        case "storage.volume":
            return disposable and target != "dstack-ssh"
        case "storage.volume_gib":
            created = pods or can.cloud == "runpod" or can.platform == "dstack"
            return created and target != "dstack-ssh" and recipe.storage.volume != ""
        case "storage.mount":
            return can.bucket_mount
    return True


def _sold(can: Capability, target: str) -> bool:
    """Whether machines have a price and a place there."""
    return target == "skypilot" or can.cloud not in ("", "kubernetes")


def check_options(recipe: Recipe, target: str) -> None:
    """Raises ConfigError for an option that the target does not obey, with the targets that do. What a
    preset asks for itself holds where it can."""
    sample = recipe.sample if recipe.kind != "sample" else None
    there = (sample.target or target) if sample else target
    view = sample_group.sampling_machines(recipe) if sample else None
    for option, value in _asked(recipe, SECTIONS):
        of_both = view is not None and not option.startswith("cluster.") and option not in OF_THE_RUN
        if not is_obeyed(recipe, target, option) and not (
            of_both and view and is_obeyed(view, there, option)
        ):
            shown = option.replace("cluster.", f"{sample_group.group_section(recipe)}.")
            name = option.removeprefix("site.")
            own = f"; machines that sample have sample.{name}" if view and name in OF_GROUP else ""
            raise ConfigError(_refused(recipe, target, option, shown, value) + own)
    if sample is None or view is None:
        return
    for option, value in _asked(view, ("cluster",)):
        if not is_obeyed(view, there, option):
            raise ConfigError(_refused(view, there, option, option.replace("cluster", "sample"), value))
    for name in OF_GROUP:
        if getattr(sample, name) and not is_obeyed(view, there, f"site.{name}"):
            shown = f"sample.{name}"
            raise ConfigError(_refused(view, there, f"site.{name}", shown, getattr(sample, name)))


def _asked(recipe: Recipe, sections: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Options that have another value than their default, and than the recipe's preset gives them. A second
    group has the image of the run's own machines where it names none."""
    name = sample_group.run_name(recipe)
    preset = RECIPES[name]() if name in RECIPES else None
    inherits = recipe.kind == "sample" and not (recipe.sample and recipe.sample.image)
    for section in sections:
        mine = getattr(recipe, section)
        of_preset = sample_group.group_section(recipe) if section == "cluster" else section
        given = getattr(preset, of_preset) if preset else None
        for field in fields(mine):
            value = getattr(mine, field.name)
            if section == "cluster" and field.name == "image" and inherits:
                continue
            if value != field.default and value != getattr(given, field.name, field.default):
                yield f"{section}.{field.name}", value


def _refused(recipe: Recipe, target: str, option: str, shown: str, value: object) -> str:
    able = [name for name in CAPABILITIES if not refusal(recipe, name) and is_obeyed(recipe, name, option)]
    able = nearest_targets(target, able) or able
    hint = f", or use {' or '.join(able[:4])}" if able else ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{shown} is {text}, and {target} does nothing with it: leave it out{hint}"
