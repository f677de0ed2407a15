"""What this machine remembers of a run that it launched: `runs/RUN_ID/launch.json`."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from trainer.config import ConfigError
from trainer.config.run_folder import LAUNCH, METRICS, PROGRESS, write_whole
from trainer.system.records import Amount, Line, MalformedRecord, Name, UnixTime, decode_record
from trainer.system.terminal_text import terminal_line

RUNS = Path("runs")
RunId = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,62}\Z")]
Option = Annotated[str, Meta(pattern=r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*\Z", max_length=1 << 16)]
"""An option of a launch: a person's own words, which may have several lines (`site.prelude`)."""
PlatformName = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._\[\]@:,-]*)?\Z", max_length=4096)]
"""Never one that a program would take for an option."""
PULLED = "pulled"
"""Folder of a run's record that its files are fetched into."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    run_id: RunId
    recipe: Line
    target: Name
    overrides: list[Option] = field(default_factory=list)
    bucket: Line = ""
    cluster: PlatformName = ""
    """The platform's name for it: SkyPilot cluster or managed job, dstack run, Slurm or PBS job id, ssh
    hosts."""
    flags: list[Option] = field(default_factory=list)
    """Passed on to the platform's program as they are: what stood after `--`."""
    uploads: dict[Line, Line] = field(default_factory=dict)
    """Fields that name a folder of this machine, and where that was uploaded to below the bucket."""
    managed: bool = False
    """SkyPilot managed job (spot, recovered by the jobs controller)."""
    started_s: UnixTime = 0.0
    """Unix time of the launch."""
    usd_per_hour: Amount = 0.0
    """Price of all nodes at launch; 0 where nothing is billed to you."""
    planned_usd: Amount = 0.0
    """Expected dollars of the whole run as planned at the launch; 0: no plan with known prices."""
    planned_hours: Amount = 0.0
    """Expected hours of the whole run as planned at the launch; 0: no plan."""
    rented: list[tuple[UnixTime, Amount, Line]] = field(default_factory=list)
    """(Unix time, dollars per hour of all nodes, what) of each kind of machine that the platform was seen to
    rent."""
    ended_s: UnixTime = 0.0
    """Unix time from which on nothing is billed any more; 0: not known to have ended."""
    confirmed: bool = True
    """Whether the platform was seen to have the run: until then its launch is an intention, which costs
    nothing."""
    state: Line = ""
    """What the run was last seen to be: running, finished, failed, stopped, gone, launch failed; "": nobody
    looked."""
    why: Line = ""
    """Why it ended or never began, in a line; "": nobody said."""
    earlier_usd: Amount = 0.0
    """What launches of the same run cost before this one."""
    earlier_hours: Amount = 0.0
    """Hours of launches of the same run before this one."""
    first_started_s: UnixTime = 0.0
    """Unix time of the run's first launch; 0: this is it."""
    desk: Line = ""
    """Host that it was launched on; "": this one, or an earlier version's record."""
    planned_most_usd: Amount = 0.0
    """Dollars that nine in ten such runs stay below, as planned at the launch; 0: no plan with known
    prices."""
    planned_most_hours: Amount = 0.0
    """The same for hours; 0: no plan."""
    samples_for: Annotated[str, Meta(pattern=r"^([a-z][a-z0-9-]{0,62})?\Z")] = ""
    """The run that these machines sample for; "": this is a run itself."""
    jobs: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Jobs that the machines were started as, each with a number behind the id where there are several."""
    counted_usd: Amount | None = None
    """What this one cost as its platform counted, where it counts and was asked."""

    def hours(self) -> float:
        """Hours of all launches, this one up to its end; one that was never confirmed has none."""
        if not self.confirmed:
            return self.earlier_hours
        return self.earlier_hours + max(0.0, self._until() - self.started_s) / 3600

    def usd(self) -> float:
        """Dollars so far, all launches together; at most, because machines are billed only once they are
        there.

        At the prices of what the platform was seen to rent, each from when it was seen; else at the launch's.
        A launch that its platform was never seen to take costs nothing without evidence.
        """
        if not self.confirmed:
            return self.earlier_usd
        if self.counted_usd is not None:
            return self.earlier_usd + self.counted_usd
        until = self._until()
        rates = []
        begins = []
        for seen, usd, _ in self.rented or [(self.started_s, self.usd_per_hour, "")]:
            begins.append(seen)
            rates.append(usd)
        begins[0] = self.started_s  # what was seen first had been rented since the launch

        parts = []
        for rate, (begin, end) in zip(rates, pairwise([*begins, until]), strict=True):
            seconds = max(0.0, min(end, until) - begin)
            parts.append(rate * seconds / 3600)
        return self.earlier_usd + sum(parts)

    def usd_per_hour_now(self) -> float:
        """Dollars per hour that are billed now, as far as is known; 0 once it has ended or was never
        confirmed."""
        if not self.confirmed or (self.ended_s and self.ended_s <= time.time()):
            return 0.0
        return self.rented[-1][1] if self.rented else self.usd_per_hour

    def seen(self, usd_per_hour: float, what: str) -> RunRecord:
        """The record with what its platform rents now."""
        if not usd_per_hour or (self.rented and tuple(self.rented[-1][1:]) == (usd_per_hour, what)):
            return self
        return replace(self, rented=[*self.rented, (time.time(), usd_per_hour, what)])

    def _until(self) -> float:
        return min(self.ended_s or time.time(), time.time())

    def names(self) -> list[str]:
        """The id of each job."""
        return [self.run_id] if self.jobs == 1 else [f"{self.run_id}-{i}" for i in range(1, self.jobs + 1)]

    def task_files(self) -> list[Path]:
        """The rendered files of the launch, main one first."""
        files = sorted((RUNS / self.run_id / "task").glob("*"))
        return sorted(files, key=lambda p: p.name.endswith((".fleet.yaml", ".volume.yaml", ".setup.sh")))

    def save(self) -> Path:
        """Writes the record and returns its path."""
        path = RUNS / self.run_id / LAUNCH
        path.parent.mkdir(parents=True, exist_ok=True)
        # A platform's own words may have line breaks and colors.
        kept = replace(self, why=terminal_line(self.why)[:4096], state=terminal_line(self.state))
        write_whole(path, f"{json.dumps(dataclasses.asdict(kept), indent=1)}\n".encode())
        return path


def is_known(run_id: str) -> bool:
    """Whether a run of that id was launched from here."""
    return (RUNS / run_id / LAUNCH).exists()


def has_begun(run_id: str) -> bool:
    """Whether a run on this machine has got to its own process, which writes its progress first."""
    return (RUNS / run_id / PROGRESS).exists()


def forget_launch(run_id: str) -> None:
    """Removes the folder of a launch on this machine that never became a run."""
    shutil.rmtree(RUNS / run_id, ignore_errors=True)


def metrics_of(folder: Path) -> Path | None:
    """The metrics of the run whose record is in `folder`, where they are here or were fetched."""
    for path in (folder / METRICS, folder / PULLED / METRICS):
        if path.is_file():
            return path
    return None


def known_ids() -> list[str]:
    """Ids of all runs that were launched from here, sorted."""
    return sorted(path.parent.name for path in RUNS.glob(f"*/{LAUNCH}"))


def known_records() -> list[RunRecord]:
    """The records of all runs that were launched from here; a damaged one is named and passed over."""
    records = []
    for run_id in known_ids():
        try:
            records.append(load_record(run_id))
        except ConfigError as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)
    return records


def workers_of(run_id: str) -> list[RunRecord]:
    """The launches of machines that sample for a run, oldest first."""
    workers = [record for record in known_records() if record.samples_for == run_id]
    return sorted(workers, key=lambda record: record.started_s)


def newest_first() -> list[RunRecord]:
    """All records by their launch. The files' times would not do: a record is written again when its run
    ends."""
    return sorted(known_records(), key=lambda record: record.started_s, reverse=True)


def load_record(run_id: str) -> RunRecord:
    """The record of a run. Raises ConfigError naming the runs that are known."""
    if not is_known(run_id):
        others = ", ".join(known_ids())
        raise ConfigError(
            f"no run {run_id} was launched from here: " + (f"known: {others}" if others else "none")
        )
    path = RUNS / run_id / LAUNCH
    try:
        record = decode_record(path.read_bytes(), RunRecord, str(path))
    except MalformedRecord as error:
        raise ConfigError(
            f"{error}: move the folder {path.parent} away, and adopt the run from its bucket"
        ) from None
    if record.run_id != run_id:
        raise ConfigError(f"{path} is the record of {record.run_id}: move the folder {path.parent} away")
    return record


def new_run_id(recipe: str) -> str:
    """A fresh id: recipe, UTC minute and four hex digits; also a valid bucket prefix, cluster name and job
    name."""
    stamp = time.strftime("%m%d-%H%M", time.gmtime())
    return f"{as_run_id(recipe)}-{stamp}-{secrets.token_hex(2)}"


def new_worker_id(run_id: str) -> str:
    """A fresh id for machines that sample for a run: that of the run, cut, and four hex digits."""
    return f"{run_id[:50].rstrip('-')}-w{secrets.token_hex(2)}"


def as_run_id(recipe: str) -> str:
    """A recipe's name with the characters that ids may have; of `file.py:function`, the function's."""
    return re.sub(r"[^a-z0-9-]", "-", recipe.rpartition(":")[2].lower())


def check_run_id(run_id: str) -> str:
    """The id, if platforms and buckets take it. Raises ConfigError."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", run_id):
        raise ConfigError(
            f"run id {run_id!r}: use at most 63 lower-case letters, digits and dashes, a letter first"
        )
    return run_id
