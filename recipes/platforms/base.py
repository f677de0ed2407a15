"""What every platform is: a class that says what a target can do and turns a recipe into its task files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult

import yaml

from recipes.platforms import clouds, programs, script
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers, merge_answers
from recipes.recipe import sample_group
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress


@dataclass(frozen=True, kw_only=True)
class Commands:
    """How one launch is driven; each is a list of argument vectors, run in order."""

    up: list[list[str]]
    status: list[list[str]]
    logs: list[list[str]]
    down: list[list[str]]


@dataclass(frozen=True)
class LaunchGiven:
    """What the program of a platform is given for a launch."""

    files: Sequence[str]
    """Rendered task files, the main one first."""
    env: Mapping[str, str]
    secrets: Sequence[str]
    """Names of tokens, never values."""
    detach: bool
    """Whether it leaves once the platform has the run, without following the logs."""

    def files_ending(self, *endings: str) -> list[str]:
        """The files whose names end so, in the order of the endings."""
        return [file for ending in endings for file in self.files[1:] if file.endswith(ending)]

    def options(self, option: str) -> list[str]:
        """The environment as options of a program: `--env NAME=value`."""
        return [word for name, value in self.env.items() for word in (option, f"{name}={value}")]


@dataclass(frozen=True, kw_only=True, eq=False)
class Platform:
    """One target: a platform, and the machines that it has there.

    Fields differ between the targets of a platform; what is the same for all of them is the class's.
    """

    name: str
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
    disk: clouds.CloudDisk | None = None
    """What checkpoints are written to, where that is slower than their upload; None: a disk of the host's
    own, or not known."""
    needs: str = ""
    """SkyPilot's part for the cloud where our launch environment lacks it: then no launch goes there unless
    the target is named or SkyPilot has fetched the cloud's catalog."""
    note: str = ""
    """What to know, with where it is from."""

    program: ClassVar[str]
    title: ClassVar[str]
    """What its program is called in a table."""
    disposable: ClassVar[bool] = False
    """Machines or containers are thrown away, with all that is on them."""
    shared_files: ClassVar[bool] = False
    """All nodes see one file system."""
    hint: ClassVar[str]
    """How to get its program."""
    runs_here: ClassVar[bool] = False
    """Nodes are processes of this machine."""
    driven_from_here: ClassVar[bool] = False
    """No platform stands between: a launch is confirmed at once, and ends with its command."""
    submits: ClassVar[bool] = False
    """Its command takes all jobs of a launch or none, and prints their number."""
    follows_one_job: ClassVar[bool] = False
    """Its command follows the log of one job, and until that ends would start no other."""
    copies_tree: ClassVar[bool] = False
    """Machines get a copy of the repository."""
    log_program: ClassVar[str] = ""
    """Program of `up` that follows a log, and may be interrupted while the run goes on."""

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The files of one group of machines, name -> text; the first is the one to launch. Raises
        ConfigError for what the platform does not take."""
        raise NotImplementedError

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        """Which of `targets.LIMITED` it does what they say for: `budget.idle_minutes`."""
        return frozenset()

    @property
    def asks_bucket(self) -> bool:
        """Whether checkpoints must go to a bucket."""
        return self.disposable

    @property
    def chooses(self) -> bool:
        """Whether it stands for other targets."""
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
            offered = ", ".join(self.gpus)
            return f"{self.name} has no {names} with {cluster.gpus_per_node} per node (it has {offered})"
        return ""

    def gpus_for(self, recipe: Recipe) -> list[str]:
        """Our names of the GPUs that the recipe takes and the target has, the recipe's first choice first."""
        cluster = recipe.cluster
        counts = {gpu: clouds.COUNTS.get((self.cloud, gpu), range(1, 9)) for gpu in self.gpus}
        wanted = (cluster.gpu, *cluster.alternatives)
        return [gpu for gpu in wanted if cluster.gpus_per_node in counts.get(gpu, ())]

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
        folder = f"storage.bucket {address.url} is a folder of one machine"
        cure = f"give s3://NAME/PREFIX, gs:// or r2://{volume}"
        raise ConfigError(f"{folder}, and {self.name} throws its machines away: {cure}")

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        """What `up`, `status`, `logs` and `down` run. Raises ConfigError where the record names no run of
        this platform."""
        raise NotImplementedError

    def own_commands(self, record: RunRecord, given: LaunchGiven, *, has_status: bool) -> Commands:
        """What `up`, `logs` and `down` run where no platform stands between. Raises ConfigError for flags
        that no program would get."""
        if record.flags:
            flags = " ".join(record.flags)
            raise ConfigError(f"{record.target} has no platform that {flags} could be passed on to")
        return Commands(
            up=[desk_driver("start" if given.detach else "up", record)],
            status=[desk_driver("status", record)] if has_status else [],
            logs=[desk_driver("logs", record)],
            down=[desk_driver("down", record)],
        )

    def shown_commands(self, record: RunRecord, files: Sequence[Path]) -> list[str]:
        """What the commands of `up` run in their turn, for a dry run, with a heading; [] if nothing."""
        return []

    def with_run_id(self, text: str, run_id: str) -> str:
        """A rendered file for one launch."""
        return text

    def keep_tokens(self, run_id: str, tokens: Mapping[str, str]) -> None:
        """Writes tokens to where the jobs take them from, if no command takes them along."""

    def ask(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        """What it says of a run; None where it does not answer, or has nothing to say."""
        return None

    def is_open(self, record: RunRecord) -> bool:
        """Whether it alone can tell if the run still costs."""
        return False

    def is_cluster(self, record: RunRecord) -> bool:
        """Whether the run has a cluster of its own, which no controller takes down."""
        return False

    def check_program(self) -> None:
        """Raises ConfigError where its program is missing."""
        if not programs.find_program(self.program):
            raise ConfigError(f"{self.program} is not installed: {self.hint}")

    def check_machines(self, recipe: Recipe) -> None:
        """Raises ConfigError where a recipe does not name the machines that it needs named."""

    def check(self, recipe: Recipe, record: RunRecord, task: str) -> None:
        """What it alone can tell before anything is rented. task: text of the main file. Raises ConfigError
        with the change to make."""

    def server_address(self, record: RunRecord) -> tuple[str, str]:
        """(address of a run's server, what to do before it can be reached)."""
        return f"http://127.0.0.1:{script.PORT}", ""

    def read_from_head(self, record: RunRecord, path: str, dry_run: bool) -> list[str]:
        """The command that prints a file of the home directory of a run's head. Raises ConfigError."""
        return ["cat", str(Path.home() / path)]

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        """The command that holds a tunnel from a port here to an address there; [] where none is needed."""
        return []

    def cure_of_silence(self, record: RunRecord) -> str:
        """What to try where a run's head does not answer."""
        return f"is it running? `python3 launch.py status {record.run_id}` says"


class Disposable(Platform):
    """What SkyPilot, dstack and Kubernetes have in common: machines or containers that are thrown away."""

    disposable = True
    copies_tree = True

    OBEYS = frozenset(
        {"cluster.cpus", "cluster.memory_gib", "cluster.disk_gib", "cluster.image", "storage.volume"}
    )

    def ask(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        if record.jobs == 1:
            return self.ask_job(record, answers)
        jobs = [self.ask_job(replace(record, run_id=name, jobs=1), answers) for name in record.names()]
        known = [job for job in jobs if job is not None]
        return merge_answers(known) if len(known) == len(jobs) else None

    def ask_job(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        """What it says of one job; None where it does not answer."""
        raise NotImplementedError

    def is_open(self, record: RunRecord) -> bool:
        return not record.ended_s

    def begin_shell(self, recipe: Recipe, work: str = "/workspace") -> str:
        """What the shell of its tasks begins with. work: where data and runs go, as a shell expression."""
        return script.preamble(
            recipe,
            work,
            asks_bucket=recipe.uses_bucket,
            data=script.data_directory(recipe),
            kept_folder=self.kept_folder(recipe),
        )


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


def for_each(words: Sequence[str], names: Sequence[str], more: Sequence[str] = ()) -> list[list[str]]:
    """One command for every name."""
    return [[*words, name, *more] for name in names]


def desk_driver(what: str, record: RunRecord) -> list[str]:
    """The command by which this desk itself starts, follows or ends a run."""
    return [sys.executable, "-m", "recipes.drivers.desk_driver", what, record.run_id]


def ssh_tunnel(login: Sequence[str], port: int, there: SplitResult) -> list[str]:
    """ssh that does nothing but forward a port. login: the ssh command that logs in."""
    forward = f"127.0.0.1:{port}:{there.hostname}:{there.port}"
    return [login[0], "-N", "-o", "ExitOnForwardFailure=yes", "-L", forward, *login[1:]]
