"""A recipe's second group of machines, as a recipe of its own that plan, prices and targets can take.

A group is a view: `sampling_machines(recipe)` has the group's machines as its `cluster`, so that whatever is
a function of a recipe (its memory, its price, what a platform can run, its task file) is one of a group too.
"""

from __future__ import annotations

from dataclasses import replace

from recipes.recipe.spec import Cluster, Recipe, SampleGroup, Site, with_placement, without_rollouts
from trainer.config import ConfigError

OWN_RUN = "${RUN_ID}"
"""`fleet.run` of files that are rendered for both groups at once: the run has the id that they are given."""
SUFFIX = ".sample"
"""What the name of a sampling group's view ends with: its files are NAME.sample.yaml beside NAME.yaml."""


def sampling_machines(recipe: Recipe) -> Recipe | None:
    """One machine of the recipe's second group, which is started `jobs` times; None without a second
    group. It samples for the run `fleet.run`; where that is not named, for the recipe's own."""
    group = recipe.sample
    if group is None:
        return None
    engine = group.engine_gpus(recipe.config.rollout.tensor_parallel)
    rollout = replace(
        recipe.config.rollout,
        tensor_parallel=engine,
        gpu_memory_utilization=group.gpu_memory_utilization,
    )
    # The run's own nodes have GPUs that sample besides; a machine of this group does nothing else.
    fleet = replace(recipe.config.fleet, run=recipe.config.fleet.run or OWN_RUN, gpus_per_node=0)
    place = replace(recipe.config.placement, workers_per_node=engine)  # of GPUs as many as there are
    view = replace(
        recipe,
        name=recipe.name + SUFFIX,
        description=f"A machine that samples for a run of {recipe.name}",
        kind="sample",
        cluster=replace(group, nodes=1, image=group.image or recipe.cluster.image),
        config=replace(recipe.config, rollout=rollout, fleet=fleet, placement=place),
        site=_site(recipe.site, group),
        # A volume is the run's: machines that prepare data in it at once would disturb each other.
        storage=replace(recipe.storage, volume="", volume_gib=0),
    )
    return with_placement(view)


def worker_machine(recipe: Recipe) -> Recipe:
    """One machine that samples for the run `fleet.run`. Raises ConfigError where none can."""
    if why := without_rollouts(recipe):
        raise ConfigError(f"fleet.run names a run to sample for, and {why}")
    group = recipe.sample or SampleGroup(gpus_per_node=min(1, recipe.cluster.gpus_per_node))
    view = sampling_machines(replace(recipe, sample=group))
    assert view is not None
    if why := nothing_to_sample(recipe):
        raise ConfigError(why)
    return view


def nothing_to_sample(recipe: Recipe) -> str:
    """Why machines of a second group would sample nothing; empty if they do."""
    if recipe.config.fleet.workers == "off":
        return (
            f"{recipe.name} samples on its own GPUs, and machines of `sample` would wait for nothing: --set "
            "fleet.workers=only, or --set sample=null"
        )
    return ""


def _site(site: Site, group: SampleGroup) -> Site:
    """The site as a sampling machine finds it. Alone, it needs no fast network to others."""
    return replace(
        site,
        partition=group.partition or site.partition,
        constraint=group.constraint,
        gres=group.gres,
        node_pool=group.node_pool,
        hosts=group.hosts,
        rdma="",
    )


def run_name(recipe: Recipe) -> str:
    """The name of the recipe that a group's view was made from."""
    return recipe.name.removesuffix(SUFFIX) if recipe.kind == "sample" else recipe.name


def group_section(recipe: Recipe) -> str:
    """The section of the recipe that names a view's machines, for messages."""
    return "sample" if recipe.kind == "sample" else "cluster"


def describe_machines(cluster: Cluster) -> str:
    """Nodes and GPUs of one group of machines."""
    kinds = "/".join((cluster.gpu, *cluster.alternatives))
    return f"{cluster.nodes} x {cluster.gpus_per_node} {kinds}"


def machine_shape(recipe: Recipe) -> str:
    """Nodes and GPUs in a word, with all GPUs that do."""
    if not recipe.cluster.gpus_per_node:
        return f"{recipe.config.placement.world_size} CPU ranks"
    more = f" + {describe_machines(recipe.sample)} to sample" if recipe.sample else ""
    return describe_machines(recipe.cluster) + more
