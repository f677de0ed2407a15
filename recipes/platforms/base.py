"""What every platform is: a class that says what a target can do and turns a recipe into its task files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recipes.platforms import clouds
from recipes.recipe import sample_group
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress


@dataclass(frozen=True, kw_only=True, eq=False)
class Platform:
    """One target: a platform, and the machines that it has there.

    Fields differ between the targets of a platform; what is the same for all of them is the class's.
    """

    name: str
    """The target's name."""
    cloud: str = ""
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
    bucket_mount: bool = False
    """The platform can mount a bucket on the node (FUSE)."""
    needs: str = ""
    """SkyPilot's part for the cloud where our launch environment lacks it: then no launch goes there unless
    the target is named or SkyPilot has fetched the cloud's catalog."""
    note: str = ""
    """What to know, with where it is from."""

    program: ClassVar[str]
    """What drives it."""
    title: ClassVar[str]
    """What it is called in a table."""
    disposable: ClassVar[bool] = False
    """Machines or containers are thrown away, with all that is on them."""
    shared_files: ClassVar[bool] = False
    """All nodes see one file system."""

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The files of one group of machines, name -> text; the first is the one to launch. Raises
        ConfigError for what the platform does not take."""
        raise NotImplementedError

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        """Which of `options.LIMITED` it does what they say for: `budget.idle_minutes`."""
        raise NotImplementedError

    @property
    def asks_bucket(self) -> bool:
        """Whether nodes are thrown away, so that checkpoints must go to a bucket."""
        return self.disposable

    @property
    def chooses(self) -> bool:
        """Whether it stands for other targets, among which it chooses."""
        return False

    @property
    def on_kubernetes(self) -> bool:
        return self.cloud == "kubernetes"

    @property
    def sold(self) -> bool:
        """Whether machines have a price and a place there."""
        return self.chooses or self.cloud not in ("", "kubernetes")

    def members(self, recipe: Recipe) -> list[Platform]:
        """The targets that it stands for: itself. Raises ConfigError where the recipe names one that it does
        not have."""
        return [self]

    def refusal(self, recipe: Recipe) -> str:
        """Why it cannot run one group of machines; empty if it can."""
        cluster = recipe.cluster
        if cluster.nodes > self.max_nodes:
            most = "one node" if self.max_nodes == 1 else f"at most {self.max_nodes} nodes"
            return f"{self.name} runs {most}, and {recipe.name} wants {cluster.nodes}"
        if cluster.spot == "only" and not self.spot:
            return f"{self.name} has no spot nodes, and {sample_group.group_section(recipe)}.spot is 'only'"
        if not cluster.gpus_per_node:
            return (
                "" if self.cpu_only else f"{self.name} rents machines with GPUs, and {recipe.name} has none"
            )
        if not self.gpus_for(recipe):
            names = ", ".join((cluster.gpu, *cluster.alternatives))
            mine = ", ".join(self.gpus)
            return f"{self.name} has no {names} with {cluster.gpus_per_node} per node (it has {mine})"
        return ""

    def gpus_for(self, recipe: Recipe) -> list[str]:
        """Our names of the GPUs that the recipe takes and the target has, the recipe's first choice first."""
        cluster = recipe.cluster
        usable = []
        for gpu in (cluster.gpu, *cluster.alternatives):
            counts = clouds.COUNTS.get((self.cloud, gpu), range(1, 9))
            if gpu in self.gpus and cluster.gpus_per_node in counts:
                usable.append(gpu)
        return usable

    def cards(self, recipe: Recipe) -> list[str]:
        """GPUs that a file asks for. Several nodes take the first choice alone, since each could get another
        card."""
        usable = self.gpus_for(recipe) if recipe.cluster.gpus_per_node else []
        return usable[:1] if recipe.cluster.nodes > 1 else usable

    def engine_gpu(self, gpu: str, count: int) -> str:
        """The platform's name of `count` of our GPUs in one node."""
        return self.gpus[gpu]

    def price_market(self, recipe: Recipe) -> str:
        """The price list's name for what it rents."""
        return self.cloud

    def price_variant(self, recipe: Recipe, gpu: str) -> str:
        """The price list's name of the form of a GPU that is rented there: RunPod's SXM and PCIe cards differ
        in price."""
        if self.price_market(recipe) != "runpod":
            return ""
        return clouds.runpod_card(gpu, recipe.cluster.gpus_per_node)

    def uses_spot(self, recipe: Recipe) -> bool:
        """Whether a rendered task asks for preemptible nodes."""
        return recipe.cluster.spot != "never" and self.spot

    def is_managed(self, recipe: Recipe) -> bool:
        """Whether a controller of the platform runs it, and starts it again when a node is taken away."""
        return False

    def kept_folder(self, recipe: Recipe) -> str:
        """The folder of a node whose files outlive the run's machines: "/" for machines of yours, "" for
        none."""
        if not self.disposable:
            return "/"
        return "/workspace" if recipe.storage.volume else ""

    def check_bucket(self, recipe: Recipe) -> None:
        """Raises ConfigError where the bucket is a folder that goes away with the machines or containers."""
        if not recipe.storage.bucket:
            return
        address = BucketAddress.parse(recipe.storage.bucket, "storage.bucket")
        kept = self.kept_folder(recipe)
        if address.is_store or (kept and f"{address.path}/".startswith(f"{kept.rstrip('/')}/")):
            return
        volume = f", or a folder below {kept}" if kept else ""
        raise ConfigError(
            f"storage.bucket {address.url} is a folder of one machine, and {self.name} throws its machines "
            f"away: give s3://NAME/PREFIX, gs:// or r2://{volume}"
        )
