"""What each target can do, as data; a refused recipe gets the name of a target that can run it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from recipes.recipe import sample_group
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress

RUNPOD = {"L4": "L4", "L40S": "L40S", "A100-80GB": "A100-80GB-SXM", "H100": "H100-SXM", "H200": "H200-SXM",
          "B200": "B200", "MI300X": "MI300X"}  # fmt: skip
GCP = {"L4": "L4", "A100": "A100", "A100-80GB": "A100-80GB", "H100": "H100", "H200": "H200", "B200": "B200"}
LABELLED = {name: name for name in ("L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200")}
DSTACK = {name: "A100" if name == "A100-80GB" else name for name in LABELLED}
DSTACK_RUNPOD = {name: DSTACK[name] for name in RUNPOD if name in DSTACK}
DSTACK_GCP = {name: DSTACK[name] for name in GCP}
AWS = {name: name for name in ("L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200")}
AZURE = {name: name for name in ("A100", "A100-80GB", "H100")}
LAMBDA = {name: name for name in ("A100", "A100-80GB", "H100", "B200")}
NEBIUS = {name: name for name in ("L40S", "H100", "H200", "B200")}
ANY = {name: name for name in (*LABELLED, "MI300X")}
NIC = {"A100-80GB": 100.0, "A100": 100.0, "H100": 200.0, "H200": 200.0, "B200": 200.0, "L4": 50.0}
"""Gb/s of GCP's machines by their first network interface, a gVNIC. Machines of eight H100 have four more,
which only GPUDirect's own images use."""


DISPOSABLE = ("sky", "dstack", "kubectl")
"""Platforms whose machines or containers are thrown away, with all that is on them."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    platform: str
    """Program that drives it: sky, dstack, kubectl, sbatch, qsub, ssh or none."""
    cloud: str
    """Whose machines, by the price list's name; empty: yours."""
    max_nodes: int = 1
    spot: bool = False
    cpu_only: bool = True
    """Takes recipes without GPUs."""
    gpus: dict[str, str]
    """Our name of a GPU -> the platform's."""
    network_gbit_s: dict[str, float]
    """Between nodes, Gbit/s per node, by GPU; "" is the default. Planning figures: the providers' or common
    ones."""
    fast: tuple[str, ...] = ()
    """GPUs of which nodes of eight take SkyPilot's `network_tier: best`."""
    bucket_mount: bool = False
    """The platform can mount a bucket on the node (FUSE)."""
    shared_files: bool = False
    """All nodes see one file system."""
    asks_bucket: bool = True
    """Nodes are thrown away, so checkpoints must go to a bucket."""
    needs: str = ""
    """SkyPilot's part for the cloud where our launch environment lacks it: then no launch goes there unless
    the target is named or SkyPilot has fetched the cloud's catalog."""
    note: str = ""
    """What to know, with where it is from."""


CAPABILITIES: dict[str, Capability] = {
    "local": Capability(
        platform="",
        cloud="",
        gpus=ANY,
        network_gbit_s={"": 0},
        shared_files=True,
        asks_bucket=False,
        note="this machine, the same set-up and node launcher",
    ),
    "ssh": Capability(
        platform="ssh",
        cloud="",
        max_nodes=64,
        gpus=ANY,
        network_gbit_s={"": 100},
        asks_bucket=False,
        note="bare machines by hand: --hosts a,b,c,d, head first",
    ),
    "slurm": Capability(
        platform="sbatch",
        cloud="",
        max_nodes=64,
        gpus=ANY,
        network_gbit_s={"": 400},
        shared_files=True,
        asks_bucket=False,
        note="requeued on preemption; no spot market of its own",
    ),
    "pbs": Capability(
        platform="qsub",
        cloud="",
        max_nodes=64,
        gpus=ANY,
        network_gbit_s={"": 400},
        shared_files=True,
        asks_bucket=False,
        note="PBS Professional, OpenPBS, Torque: pbsdsh where it is, else ssh over the node file",
    ),
    "skypilot": Capability(
        platform="sky",
        cloud="",
        max_nodes=16,
        spot=True,
        gpus=GCP,
        network_gbit_s=NIC | {"": 100},
        note="cheapest of RunPod (one node only) and GCP, or of site.clouds, spot before on-demand",
    ),
    "skypilot-runpod": Capability(
        platform="sky",
        cloud="runpod",
        spot=True,
        gpus=RUNPOD,
        network_gbit_s={"": 0},
        note="one node; no FUSE, so checkpoints go up by our own uploader; machines go down, never stop",
    ),
    "skypilot-gcp": Capability(
        platform="sky",
        cloud="gcp",
        max_nodes=16,
        spot=True,
        gpus=GCP,
        network_gbit_s=NIC | {"": 100},
        bucket_mount=True,
        note="between nodes one gVNIC: GPUDirect's images have drivers of their own",
    ),
    "skypilot-kubernetes": Capability(
        platform="sky",
        cloud="kubernetes",
        max_nodes=64,
        gpus=LABELLED,
        network_gbit_s={"": 400},
        bucket_mount=True,
        fast=tuple(LABELLED),
        note="your cluster's own node pools; spot only as the pool you name",
    ),
    "dstack-runpod": Capability(
        platform="dstack",
        cloud="runpod-cluster",
        max_nodes=8,
        cpu_only=False,
        gpus=DSTACK_RUNPOD,
        network_gbit_s={"A100-80GB": 1600, "H100": 3200, "": 3200},
        note="one pod, or an Instant Cluster of 2 to 8: on demand, one network volume, never spot",
    ),
    "dstack-gcp": Capability(
        platform="dstack",
        cloud="gcp",
        max_nodes=16,
        spot=True,
        gpus=DSTACK_GCP,
        network_gbit_s=NIC | {"": 100},
    ),
    "dstack-kubernetes": Capability(
        platform="dstack",
        cloud="kubernetes",
        max_nodes=64,
        gpus=DSTACK,
        network_gbit_s={"": 400},
        note="your cluster's node pools",
    ),
    "dstack-ssh": Capability(
        platform="dstack",
        cloud="",
        max_nodes=64,
        gpus=DSTACK,
        network_gbit_s={"": 100},
        asks_bucket=False,
        note="own machines as an SSH fleet: --hosts",
    ),
    "kubernetes": Capability(
        platform="kubectl",
        cloud="kubernetes",
        max_nodes=64,
        spot=True,
        gpus=LABELLED,
        network_gbit_s={"": 400},
        note="your cluster with the JobSet controller; no tool between",
    ),
    "skypilot-aws": Capability(
        platform="sky",
        cloud="aws",
        max_nodes=16,
        spot=True,
        gpus=AWS,
        network_gbit_s={"": 100},
        bucket_mount=True,
        needs="skypilot[aws]",
        note="between nodes TCP: EFA is not set up",
    ),
    "skypilot-azure": Capability(
        platform="sky",
        cloud="azure",
        max_nodes=16,
        spot=True,
        gpus=AZURE,
        network_gbit_s={"": 24},
        bucket_mount=True,
        needs="skypilot[azure]",
        note="between nodes TCP; H100 by one and two: SkyPilot lists the machine of eight as one of twelve",
    ),
    "skypilot-lambda": Capability(
        platform="sky",
        cloud="lambda",
        max_nodes=16,
        gpus=LAMBDA,
        network_gbit_s={"": 100},
        bucket_mount=True,
        note="on demand; machines go down, never stop",
    ),
    "skypilot-nebius": Capability(
        platform="sky",
        cloud="nebius",
        max_nodes=16,
        spot=True,
        gpus=NEBIUS,
        bucket_mount=True,
        network_gbit_s={"H100": 3200, "H200": 3200, "B200": 3200, "": 100},
        fast=("H100", "H200", "B200"),
        needs="skypilot[nebius]",
        note="InfiniBand between nodes of eight (network_tier: best)",
    ),
}

COUNTS = {
    ("gcp", "H100"): (1, 2, 4, 8),
    ("gcp", "H200"): (8,),
    ("gcp", "B200"): (8,),
    ("gcp", "A100-80GB"): (1, 2, 4, 8),
    ("aws", "A100"): (8,),
    ("aws", "A100-80GB"): (8,),
    ("aws", "H100"): (1, 8),
    ("aws", "H200"): (8,),
    ("aws", "B200"): (8,),
    ("aws", "L4"): (1, 4, 8),
    ("aws", "L40S"): (1, 4, 8),
    ("azure", "A100"): (8,),
    ("azure", "A100-80GB"): (1, 2, 4, 8),
    ("azure", "H100"): (1, 2),
    ("lambda", "A100"): (1, 2, 4, 8),
    ("lambda", "A100-80GB"): (8,),
    ("lambda", "H100"): (1, 2, 4, 8),
    ("lambda", "B200"): (1, 2, 4, 8),
    ("nebius", "L40S"): (1, 2, 4),
    ("nebius", "H100"): (1, 8),
    ("nebius", "H200"): (1, 8),
    ("nebius", "B200"): (1, 8),
}
"""GPUs per node that a cloud sells, where it is not every number up to 8."""


SINGLE = {("runpod", "A100-80GB"): "A100-80GB"}
"""Cheaper variants that do where a node has one GPU: without NVLink."""


def engine_gpu(target: str, gpu: str, count: int) -> str:
    """The platform's name of `count` of our GPUs in one node."""
    can = capability(target)
    return SINGLE.get((can.cloud, gpu), can.gpus[gpu]) if count == 1 else can.gpus[gpu]


def price_variant(recipe: Recipe, target: str, gpu: str) -> str:
    """The price list's name of the form of a GPU that is rented there: RunPod's SXM and PCIe cards differ in
    price."""
    return (
        engine_gpu("skypilot-runpod", gpu, recipe.cluster.gpus_per_node)
        if price_market(recipe, target) == "runpod"
        else ""
    )


def sky_targets(recipe: Recipe) -> list[str]:
    """The targets that `skypilot` chooses among. Raises ConfigError on a cloud that is none of them."""
    known = {}
    for name, can in CAPABILITIES.items():
        if can.platform == "sky" and can.cloud not in ("", "kubernetes"):
            known[can.cloud] = name
    clouds = recipe.site.clouds or ("runpod", "gcp")
    unknown = [cloud for cloud in clouds if cloud not in known]
    if unknown:
        raise ConfigError(f"site.clouds has {', '.join(unknown)}: give some of {', '.join(sorted(known))}")
    return [known[cloud] for cloud in clouds]


def capability(target: str) -> Capability:
    """The target of that name. Raises ConfigError naming the nearest one."""
    if target not in CAPABILITIES:
        near = [one for one in CAPABILITIES if target in one.split("-")]  # a cloud, which several reach
        near = near or difflib.get_close_matches(target, CAPABILITIES, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(CAPABILITIES)}"
        raise ConfigError(f"unknown target {target}: {hint}")
    return CAPABILITIES[target]


def refusal(recipe: Recipe, target: str) -> str:
    """Why the target cannot run the recipe with all its groups of machines; empty if it can."""
    why = _refusal_of_group(recipe, target)
    if why:
        return why
    sampling = sample_group.sampling_machines(recipe) if recipe.kind != "sample" else None
    if sampling is None or recipe.sample is None:
        return ""
    return _refusal_of_group(sampling, recipe.sample.target or target)


def _refusal_of_group(recipe: Recipe, target: str) -> str:
    can, cluster = capability(target), recipe.cluster
    if cluster.nodes > can.max_nodes:
        most = "one node" if can.max_nodes == 1 else f"at most {can.max_nodes} nodes"
        return f"{target} runs {most}, and {recipe.name} wants {cluster.nodes}"
    if not can.platform and recipe.jobs > 1 and cluster.gpus_per_node:
        return f"{target} is one machine, and {recipe.name} wants {recipe.jobs}: set sample.gpus_per_node"
    if cluster.spot == "only" and not can.spot:
        return f"{target} has no spot nodes, and {sample_group.group_section(recipe)}.spot is 'only'"
    if not cluster.gpus_per_node:
        return "" if can.cpu_only else f"{target} rents machines with GPUs, and {recipe.name} has none"
    if not gpus_for(recipe, target):
        names = ", ".join((cluster.gpu, *cluster.alternatives))
        return f"{target} has no {names} with {cluster.gpus_per_node} per node (it has {', '.join(can.gpus)})"
    return ""


def gpus_for(recipe: Recipe, target: str) -> list[str]:
    """Our names of the GPUs that the recipe takes and the target has, the recipe's first choice first."""
    can = capability(target)
    cluster = recipe.cluster
    found = []
    for gpu in (cluster.gpu, *cluster.alternatives):
        counts = COUNTS.get((can.cloud, gpu), range(1, 9))
        if gpu in can.gpus and cluster.gpus_per_node in counts:
            found.append(gpu)
    return found


def targets_for(recipe: Recipe) -> list[str]:
    """Targets that can run the recipe."""
    meant = recipe.targets or tuple(CAPABILITIES)
    return [name for name in CAPABILITIES if name in meant and not refusal(recipe, name)]


def check_target(recipe: Recipe, target: str) -> None:
    """Raises ConfigError where the target cannot run the recipe: why, and which can."""
    why = refusal(recipe, target)
    if not why and recipe.targets and target not in recipe.targets:
        why = f"{recipe.name} is not made for {target}"
    if why:
        others = nearest_targets(target, targets_for(recipe))
        if others:
            hint = f"use {' or '.join(others[:4])}"
        elif recipe.targets == ("local",):
            hint = "it runs on this machine, --target local"
        else:
            hint = "no target can: change cluster.nodes, cluster.gpu or cluster.spot"
            hint += ", or those of sample" if recipe.sample else ""
        raise ConfigError(f"{why}: {hint}")


def nearest_targets(target: str, names: Iterable[str]) -> list[str]:
    """Targets to name in the place of one, the nearest first."""
    others = [name for name in names if name not in ("local", "skypilot", target)]
    return sorted(others, key=lambda name: _nearness(target, name))


def kept_folder(recipe: Recipe, target: str) -> str:
    """The folder of a node whose files outlive the run's machines: "/" for machines of yours, "" for none."""
    if capability(target).platform not in DISPOSABLE:
        return "/"
    return "/workspace" if recipe.storage.volume else ""


def check_bucket(recipe: Recipe, target: str) -> None:
    """Raises ConfigError where the bucket is a folder that goes away with the target's machines or
    containers."""
    if not recipe.storage.bucket:
        return
    address = BucketAddress.parse(recipe.storage.bucket, "storage.bucket")
    kept = kept_folder(recipe, target)
    if address.is_store or (kept and f"{address.path}/".startswith(f"{kept.rstrip('/')}/")):
        return
    volume = f", or a folder below {kept}" if kept else ""
    raise ConfigError(
        f"storage.bucket {address.url} is a folder of one machine, and {target} throws its machines away: "
        f"give s3://NAME/PREFIX, gs:// or r2://{volume}"
    )


def price_market(recipe: Recipe, target: str) -> str:
    """The price list's name for what a target rents: RunPod has one price for pods and another for
    clusters."""
    cloud = capability(target).cloud
    return "runpod" if cloud == "runpod-cluster" and recipe.cluster.nodes == 1 else cloud


def _nearness(target: str, other: str) -> tuple[bool, bool]:
    """Sorts alternatives: the same cloud first, then machines for rent, then your own."""
    cloud, theirs = target.partition("-")[2], other.partition("-")[2]
    return (cloud != theirs or not cloud, not CAPABILITIES[other].cloud)


def is_managed(recipe: Recipe, target: str) -> bool:
    """Whether SkyPilot's jobs controller runs it, and starts it again when a node is taken away, evicted or
    drained."""
    can = capability(target)
    return (
        can.platform == "sky"
        and recipe.cluster.gpus_per_node > 0
        and recipe.kind in ("train", "sample")
        and (uses_spot(recipe, target) or can.cloud == "kubernetes")
    )


def uses_spot(recipe: Recipe, target: str) -> bool:
    """Whether a rendered task asks for preemptible nodes."""
    return recipe.cluster.spot != "never" and capability(target).spot
