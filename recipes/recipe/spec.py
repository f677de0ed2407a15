"""What a recipe is: one run's configuration, and the machines, data, storage and budget that it needs.

A recipe is data. Presets return one (`recipes/presets`), targets turn it into the text that a platform takes
(`recipes/platforms`), the plan says what it needs and costs (`recipes/plan`). Nothing here imports torch, ray
or vllm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from recipes.recipe.plain_texts import check_texts
from trainer import config as run_config
from trainer.config import ConfigError, RunConfig, unknown_key
from trainer.config.bucket_address import FORMS, BucketAddress, is_address
from trainer.config.ranges import check_ranges, ranged_field
from trainer.config.schema import WORKER_GPU_SHARE
from trainer.hardware.gpus import BATCH_INVARIANT, gpu_named
from trainer.hardware.model_shapes import has_known_shape, shape_of

PLACEHOLDERS = ("RUN_ID", "RUNS", "DATA", "MODELS", "BUCKET")
"""Names that a recipe's configuration may hold as ${NAME}: known only where it runs, filled in by the task's
script."""
ASKED_BUCKET = "${BUCKET}"
"""`checkpoint.remote` of a recipe that names no bucket: it is asked for at launch."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    nodes: int = ranged_field(1, least=1)
    """Nodes, all alike."""
    gpus_per_node: int = ranged_field(8, least=0, most=16)
    """GPUs of each node; 0 runs on CPU ranks."""
    gpu: str = "H100"
    """GPU that the recipe is made for: a name of trainer/hardware/gpus.py."""
    alternatives: tuple[str, ...] = ()
    """GPUs that do as well; platforms that can choose take the cheapest."""
    spot: Literal["prefer", "only", "never"] = "prefer"
    """prefer: preemptible nodes where the target has them, on-demand as the fallback. only: refused without
    them."""
    cpus: int = ranged_field(0, least=0)
    """vCPUs per node; 0: 8 per GPU and 8 for the node itself."""
    memory_gib: int = ranged_field(0, least=0)
    """Host RAM per node, GiB; 0: from the memory plan."""
    disk_gib: int = ranged_field(0, least=0)
    """Disk per node, GiB; 0: from the memory plan."""
    shm_gib: int = ranged_field(0, least=0)
    """/dev/shm per node, GiB; 0: from the memory plan."""
    image: str = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel"
    """Container image where the target runs containers: Python with pip, and CUDA's compiler."""


@dataclass(frozen=True, kw_only=True)
class SampleGroup(Cluster):
    """A second group of machines, which only sample completions. Each is a job of its own: one that is taken
    away or comes late holds up no other, and none of them belongs to the run's attempts."""

    nodes: int = ranged_field(1, least=1, most=64)
    """Machines, all alike."""
    gpus_per_node: int = ranged_field(1, least=0, most=16)
    """GPUs of each machine; 0 where the run is on CPU ranks."""
    gpu: str = "L40S"
    """GPU that the group is made for: a name of trainer/hardware/gpus.py."""
    target: str = ""
    """Target of these machines; empty: the run's."""
    hosts: tuple[str, ...] = ()
    """Bare machines, as in site.hosts; those are the run's alone."""
    image: str = ""
    """Container image where the target runs containers; empty: cluster.image."""
    tensor_parallel: int = ranged_field(0, least=0, most=16)
    """GPUs of one engine, of which a machine has as many as its GPUs allow; 0: rollout.tensor_parallel, or
    all GPUs of a machine that has fewer. On CPU: ranks of one engine."""
    gpu_memory_utilization: float = ranged_field(WORKER_GPU_SHARE, above=0, below=1)
    """Share of a GPU's memory that an engine takes. Nothing is trained beside it, so it is more than
    rollout.gpu_memory_utilization."""
    partition: str = ""
    """Slurm partition or PBS queue; empty: site.partition."""
    constraint: str = ""
    """Slurm node features; site.constraint is for the run's machines alone."""
    gres: str = ""
    """Slurm's generic resource per machine, where the site wants it in place of --gpus-per-node:
    `gpu:l40s:1`."""
    node_pool: str = ""
    """Node pool label; empty: any node with these GPUs. site.node_pool is for the run's machines alone."""

    def engine_gpus(self, wanted: int) -> int:
        """GPUs of one engine, where an engine of the run has `wanted`; ranks of one on CPU."""
        available = min(wanted, self.gpus_per_node) if self.gpus_per_node else wanted
        return self.tensor_parallel or available


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something prepared once before training, in the training environment; skipped where its result is
    there."""

    creates: str
    """File that exists when the step is done."""
    module: str
    """What runs: `python -m` this."""
    args: tuple[str, ...] = ()
    """Arguments; ${NAME} placeholders are filled in."""


MARKS = {"models": "config.json", "data": "manifest.json"}
"""The file that every folder of a kind has."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A folder of this machine that a rented node fetches from the bucket."""

    field: str
    """Field of the configuration that names it: `model.path`."""
    local: str
    """Absolute path here."""
    key: str
    """Where it is below the bucket: `models/mine-1a2b3c4d`."""

    @property
    def there(self) -> str:
        """Where the nodes find it."""
        kind, _, name = self.key.partition("/")
        return f"${{{kind.upper()}}}/{name}"

    def step(self, bucket: str) -> Step:
        """What a node does for it."""
        mark = MARKS[self.key.partition("/")[0]]
        args = ("fetch", f"{bucket}/{self.key}", self.there)
        return Step(creates=f"{self.there}/{mark}", module="trainer.storage", args=args)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The data, as the plan and the list speak of it."""

    name: str = ""
    """Name that `launch.py data prepare` knows."""
    rows: int = ranged_field(0, least=0)
    """Rows of the training split."""
    guess: str = ""
    """What is said of `rows` where nobody could count them; "": they are counted."""
    held_out: str = "test"
    """Split that runs are evaluated on."""
    prompt_tokens: int = ranged_field(512, least=1)
    """Typical prompt, image tokens included."""
    answer_tokens: int = ranged_field(400, least=1)
    """Typical answer."""
    disk_gib: float = ranged_field(1.0, least=0)
    """Source and prepared form together, GiB."""


@dataclass(frozen=True, kw_only=True)
class StorageSite:
    """Where checkpoints and caches go."""

    bucket: str = ""
    """Object-store URL (s3://, gs://, r2://); empty: asked for at launch (BUCKET)."""
    volume: str = ""
    """Network volume or claim mounted at /workspace that keeps model weights and data between launches;
    optional."""
    volume_gib: int = ranged_field(0, least=0)
    """Size of that volume, GiB; 0: from the memory plan."""
    weights: str = ""
    """What a run exported (BUCKET/RUN/checkpoints/hf, or a folder where the nodes are this machine's) in the
    place of model.path's weights; an adapter is merged into these."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that the platforms enforce."""

    max_hourly_usd: float = ranged_field(0.0, least=0)
    """Dearest node that may be rented, dollars per hour; 0: no limit."""
    max_hours: float = ranged_field(24.0, above=0)
    """Longest run, over all attempts of a launch: the head then has it save, and ends it for good. Of one job
    it is Slurm's --time, PBS's walltime, dstack's max_duration and Kubernetes' deadline."""
    max_restarts: int = ranged_field(3, least=0)
    """Attempts in a row that may fail without a new checkpoint before the run ends for good."""
    max_losses: int = ranged_field(10, least=0)
    """The same for attempts whose machines were taken away or lost; it begins again with every checkpoint."""
    max_requeues: int = ranged_field(20, least=0)
    """Restarts of one job of Slurm or PBS, or of a sampling pod of Kubernetes, whatever the reason; `resume`
    submits a new one."""
    idle_minutes: int = ranged_field(3, least=0)
    """Machines of managed jobs and of dstack wait this long for the next attempt of a run, then they go
    down."""
    keep_minutes: int = ranged_field(0, least=0)
    """Machines that no next attempt waits for (SkyPilot's on demand, servers, preflight) stay this long after
    their job, for a look at them; 0: they go down at once, whether the job succeeded or failed."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What belongs to your site and not to the recipe. Every field has an empty default that is left out."""

    region: str = ""
    """Cloud region, `us-central1`, or RunPod country and data centre, `US/US-KS-2`."""
    clouds: tuple[str, ...] = ()
    """Clouds that the target skypilot chooses among, of runpod, gcp, aws, azure, lambda and nebius; empty:
    runpod and gcp."""
    kubernetes_context: str = ""
    """Context of your kubeconfig."""
    namespace: str = ""
    """Kubernetes namespace; empty: that of the context."""
    node_pool: str = ""
    """Node pool label (GKE: cloud.google.com/gke-nodepool)."""
    gpu_label: str = ""
    """Label and value of the Kubernetes nodes with the planned GPU, `example.com/card=h100`; empty: NVIDIA's
    and GKE's own labels."""
    topology: str = ""
    """Node label of a network domain (a rack, a block): the pods of a run get one for themselves."""
    queue: str = ""
    """Kueue's local queue that the pods wait in."""
    storage_class: str = ""
    """Storage class of the claim `storage.volume`; several nodes need one that many can write to
    (ReadWriteMany)."""
    rdma: str = ""
    """Extended resource of the InfiniBand devices (rdma/ib) and how many: `rdma/ib:8`."""
    hosts: tuple[str, ...] = ()
    """Bare machines, head first: [user@]address[:port][/address among the nodes]."""
    ssh_key: str = ""
    """Private key for them; default: ssh's own choice."""
    shared_dir: str = ""
    """Directory that all nodes see (Slurm, PBS, NFS): data, models, runs. Default: inside the repository."""
    partition: str = ""
    """Slurm partition or PBS queue."""
    account: str = ""
    """Slurm or PBS account."""
    walltime_hours: float = ranged_field(0.0, least=0)
    """Longest job that the site allows, hours (Slurm, PBS), where budget.max_hours is more; 0: no limit."""
    qos: str = ""
    """Slurm quality of service."""
    constraint: str = ""
    """Slurm node features: `a100&ib`."""
    reservation: str = ""
    """Slurm reservation."""
    gres: str = ""
    """Slurm's generic resource per node, where the site wants it for --gpus-per-node: `gpu:h100:8`."""
    prelude: tuple[str, ...] = ()
    """Lines of shell that every node begins with: `module load cuda/13`."""
    offline: bool = False
    """Compute nodes have no internet (Slurm, PBS): `up` prepares all they need where it is called."""
    container: Literal["", "pyxis", "apptainer"] = ""
    """Run inside cluster.image by this container runtime (Slurm)."""
    image_secret: str = ""
    """What opens a private registry: a Secret of the Kubernetes namespace, or NAME of dstack's secrets
    NAME_username and NAME_password."""
    pbs: Literal["pro", "torque"] = "pro"
    """Dialect of the resource request: PBS Professional and OpenPBS, or Torque."""
    grace_s: int = ranged_field(120, least=0)
    """Seconds from notice to kill: Slurm's GraceTime, Kubernetes' terminationGracePeriodSeconds."""


Target = Literal["local", "ssh", "slurm", "pbs", "skypilot", "skypilot-runpod", "skypilot-gcp",
                 "skypilot-kubernetes", "skypilot-aws", "skypilot-azure", "skypilot-lambda",
                 "skypilot-nebius", "dstack-runpod", "dstack-gcp", "dstack-kubernetes", "dstack-ssh",
                 "kubernetes"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One thing to run, whole."""

    name: str
    """Also the default run name; lower-case letters, digits, dots and dashes."""
    description: str
    """One line for the list."""
    kind: Literal["train", "preflight", "check", "serve", "sample"] = "train"
    """preflight runs the node launcher's checks and a collective between all nodes, and no model; check
    measures a card (recipes/gpu_check.py); serve runs vLLM's server on one node. sample is one machine of a
    second group, as recipes/recipe/sample_group.py makes it from a recipe with fleet.run; no recipe is
    written so."""
    config: RunConfig = field(default_factory=RunConfig)
    """What the trainer runs."""
    cluster: Cluster = field(default_factory=Cluster)
    """The machines it wants."""
    sample: SampleGroup | None = None
    """Machines that sample completions beside them, and speak with the run through its bucket alone."""
    dataset: DataFacts = field(default_factory=DataFacts)
    """The data, for the plan."""
    steps: tuple[Step, ...] = ()
    """Preparation, in order."""
    uploads: tuple[Upload, ...] = ()
    """Folders of this machine; the plan reads them here, the nodes there."""
    storage: StorageSite = field(default_factory=StorageSite)
    """Bucket and volume."""
    budget: Budget = field(default_factory=Budget)
    """Limits in dollars, hours and restarts."""
    site: Site = field(default_factory=Site)
    """Your regions, partitions, hosts."""
    targets: tuple[Target, ...] = ()
    """Targets that it is meant for; empty: every target that can run its shape."""
    setup: Literal["", "cpu", "gpu", "rocm"] = ""
    """Environment; default: gpu, or cpu where the cluster has no GPUs. cpu leaves rented GPUs alone, for a
    try-out: those of both groups."""

    @property
    def saves(self) -> bool:
        """Whether it is a run that saves checkpoints: a check of a card is one, too."""
        return self.kind in ("train", "check")

    @property
    def environment(self) -> str:
        """Name of the locked environment that the nodes set up."""
        if self.cluster.gpus_per_node and self.cluster.gpu.startswith("MI"):
            return self.setup or "rocm"
        return self.setup or ("gpu" if self.cluster.gpus_per_node else "cpu")

    @property
    def uses_bucket(self) -> bool:
        """Whether its machines work with a bucket, which is asked for where the recipe names none."""
        return self.saves or self.kind == "sample"

    @property
    def jobs(self) -> int:
        """Jobs that the machines are started as: one for all nodes of a run, one for each that samples."""
        return self.sample.nodes if self.sample and self.kind == "sample" else 1

    @property
    def job_hours(self) -> float:
        """Longest batch job."""
        return min(self.budget.max_hours, self.site.walltime_hours or self.budget.max_hours)

    @property
    def cpus(self) -> int:
        """vCPUs per node."""
        return self.cluster.cpus or max(
            2, 8 * self.cluster.gpus_per_node + (8 if self.cluster.gpus_per_node else 2)
        )


def override(recipe: Recipe, assignments: list[str]) -> Recipe:
    """Applies `--set section.key=value`: sections of the recipe (cluster, storage, ...) or of its run
    configuration.

    Nodes and GPUs are the cluster's; `placement` follows them. Raises ConfigError on an unknown key.
    """
    sections = [f.name for f in fields(RunConfig)]
    parts = [
        f.name
        for f in fields(Recipe)
        if f.name in ("cluster", "sample", "dataset", "storage", "budget", "site", "setup")
    ]
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        head = key.partition(".")[0].strip()
        if head == "sample" and recipe.sample is None:
            recipe = replace(recipe, sample=SampleGroup())
        if head in parts:
            recipe = run_config.override(recipe, [assignment])
        elif key in ("placement.nodes", "placement.workers_per_node"):
            raise ConfigError("placement follows the cluster: set cluster.nodes and cluster.gpus_per_node")
        elif key == "run.id":
            raise ConfigError("run.id is the launch's own: give it as --run-id")
        elif key in ("checkpoint.max_restarts", "checkpoint.max_losses", "checkpoint.max_hours"):
            raise ConfigError(f"{key} follows the budget: set {key.replace('checkpoint', 'budget')}")
        elif head in sections:
            recipe = replace(recipe, config=run_config.override(recipe.config, [assignment]))
        else:
            raise ConfigError(unknown_key(key, head, parts + sections))
    return with_placement(recipe)


def with_placement(recipe: Recipe) -> Recipe:
    """The recipe with `placement` written from its cluster and its restarts from its budget: they cannot
    disagree."""
    cluster, place = recipe.cluster, recipe.config.placement
    device = "cpu" if recipe.environment == "cpu" else "cuda"
    ranks = place.workers_per_node
    if device == "cuda":
        ranks = cluster.gpus_per_node - recipe.config.fleet.gpus_per_node
        if recipe.config.fleet.gpus_per_node and ranks < 1:
            raise ConfigError(
                f"fleet.gpus_per_node is {recipe.config.fleet.gpus_per_node}, and a node has"
                f" {cluster.gpus_per_node} GPUs: leave one at least that learns"
            )
    place = replace(place, nodes=cluster.nodes, workers_per_node=ranks, device=device)
    budget = recipe.budget
    save = replace(
        recipe.config.checkpoint,
        max_restarts=budget.max_restarts,
        max_losses=budget.max_losses,
        max_hours=budget.max_hours,
    )
    return replace(recipe, config=replace(recipe.config, placement=place, checkpoint=save))


def _check_image(recipe: Recipe) -> None:
    """Raises ConfigError for an image that one platform would take, and others for another's name."""
    image = recipe.cluster.image
    name = image.removeprefix("docker:").removeprefix("//")
    if name != image:
        raise ConfigError(f"cluster.image is {image}: leave docker: out, for example {name}")
    is_file = image.startswith("/") or image.endswith((".sif", ".sqsh"))
    if is_file and not (recipe.site.container and image.startswith("/")):
        raise ConfigError(
            f"cluster.image is {image}, an image's file, which site.container alone takes, by its path"
        )


def validate(recipe: Recipe) -> None:
    """Checks a recipe by itself, before any target. Raises ConfigError with the change to make."""
    cluster = recipe.cluster
    for section in (cluster, recipe.dataset, recipe.storage, recipe.budget, recipe.site):
        check_ranges(section, f"{type(section).__name__.lower()}.")
    for name in ("cluster", "storage", "site"):
        check_texts(getattr(recipe, name), f"{name}.")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", recipe.name):
        raise ConfigError(f"recipe name {recipe.name!r}: use lower-case letters, digits, dots and dashes")
    for name in (cluster.gpu, *cluster.alternatives) if cluster.gpus_per_node else ():
        gpu_named(name)
    _check_image(recipe)
    if recipe.storage.bucket:
        BucketAddress.parse(recipe.storage.bucket, "storage.bucket")
    weights = recipe.storage.weights
    if weights and not weights.startswith("/"):
        if not is_address(weights):
            raise ConfigError(f"storage.weights {weights!r}: write it as {FORMS}, or as an absolute path")
        BucketAddress.parse(weights, "storage.weights")
    if recipe.kind == "serve" and cluster.nodes > 1:
        raise ConfigError(f"cluster.nodes is {cluster.nodes}, and one server runs on one node: set it to 1")
    if recipe.kind == "sample":  # the recipe that it is a view of has been checked
        return
    if recipe.saves:
        run_config.validate(recipe.config)
        run_config.validate_saving(recipe.config)
    if recipe.config.run.deterministic == "cuda":
        _check_deterministic(recipe)
    if recipe.sample:
        _check_sample(recipe, recipe.sample)


def _check_deterministic(recipe: Recipe) -> None:
    """Checks that vLLM has repeatable kernels for the model and the GPUs. Raises ConfigError."""
    cluster, model = recipe.cluster, recipe.config.model
    named = (cluster.gpu, *cluster.alternatives) if cluster.gpus_per_node else ()
    older = [name for name in named if name not in BATCH_INVARIANT]
    if older:
        raise ConfigError(
            f"run.deterministic=cuda needs a GPU among {', '.join(BATCH_INVARIANT)}, and the recipe takes"
            f" {', '.join(older)}: set cluster.gpu and cluster.alternatives, or leave run.deterministic empty"
        )
    shape = shape_of(model.path, model.revision) if has_known_shape(model.path, model.revision) else None
    if shape and shape.delta:
        raise ConfigError(
            "run.deterministic=cuda: vLLM has no repeatable kernels for the gated delta-net layers of"
            f" {model.path}:"
            " leave run.deterministic empty"
        )


def _check_sample(recipe: Recipe, sample: SampleGroup) -> None:
    """Checks the second group, where the recipe is valid without it. Raises ConfigError with the change."""
    if why := without_rollouts(recipe):
        raise ConfigError(f"sample names machines that sample completions, and {why}: --set sample=null")
    if recipe.environment == "cpu" and sample.gpus_per_node and not recipe.cluster.gpus_per_node:
        raise ConfigError(
            f"sample names machines with GPUs, and {recipe.name} runs on CPU ranks: --set "
            "sample.gpus_per_node=0"
        )
    if recipe.environment != "cpu" and not sample.gpus_per_node:
        raise ConfigError(f"sample.gpus_per_node is 0, and {recipe.name} is made for GPUs: give 1 or more")
    if not recipe.config.checkpoint.remote:
        raise ConfigError(
            "machines of `sample` speak with the run through its bucket alone, and checkpoint.remote is "
            "empty: set it, or --set sample=null"
        )
    check_ranges(sample, "sample.")
    check_texts(sample, "sample.")
    for name in (sample.gpu, *sample.alternatives) if sample.gpus_per_node else ():
        gpu_named(name)
    engine = sample.engine_gpus(recipe.config.rollout.tensor_parallel)
    if sample.gpus_per_node and sample.gpus_per_node % engine:
        raise ConfigError(
            f"an engine of {engine} GPUs does not divide the {sample.gpus_per_node} GPUs of a machine of "
            f"`sample`: set sample.tensor_parallel to a divisor of {sample.gpus_per_node}"
        )


def without_rollouts(recipe: Recipe) -> str:
    """Why a recipe has no rollouts that other machines could sample; empty if it has."""
    config = recipe.config
    if recipe.kind != "train":
        return f"{recipe.name} ({recipe.kind}) trains nothing"
    if config.method != "grpo":
        return f"method {config.method} samples none"
    if (config.evaluation.pass_rate_samples or config.evaluation.benchmarks) and config.loads_policy:
        return "an evaluation trains nothing (evaluate --fleet has workers sample it)"
    return ""
