"""Finding the checkpoint to resume from (newest first, whole, and of this very run), and reading it: any
number of ranks from shards of any number.

Files come from the local folder where they are whole, else from the store as they are needed; every file's
sha256 is compared with the manifest's before it is used. Of a file whose index has checksums of its blocks,
and that was not fetched before, only ranges are read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.checkpoint.course import CheckpointHistory, refuse_other, refuse_unsigned, rewound
from trainer.checkpoint.format import BLOCK_BYTES, RangedShard, decode_state
from trainer.checkpoint.layout import CheckpointKey, local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import (
    CheckpointError,
    CorruptCheckpoint,
    every_manifest,
    manifests_here,
    newest_of_each,
    rank_stem,
    unpack,
)
from trainer.config import ConfigError, RunConfig
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError

PARALLEL_FILES = 4
"""Files that one reader fetches and verifies at a time."""
PARALLEL_READS = 8
"""Slices that `stream` reads at a time, each of at most a rank's piece of one parameter."""
Identity = tuple[str, int, int, int]
"""Path, bytes, time of the last change (ns) and inode: a file that is the same has the same content."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A committed checkpoint. Plain data, cheap to send to the ranks."""

    step: int
    directory: str
    """Local folder; files are fetched into it as they are needed."""
    url: str
    """The same checkpoint in the object store, or empty."""
    manifest: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    """What the driver saved: `begin(step, state)`."""
    verified: dict[Identity, str] = field(default_factory=dict)
    """sha256 of the local files that the driver has compared: ranks that see the very same files need not."""

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]

    @property
    def ahead(self) -> list[int]:
        """Steps after it that older weights had sampled: a resume needs their rollout logs."""
        return self.manifest.get("ahead", [])

    def file(self, name: str) -> dict[str, Any]:
        """The manifest's entry: name, bytes, sha256. Raises CorruptCheckpoint if there is none."""
        for entry in self.manifest["files"]:
            if entry["name"] == name:
                return entry
        raise CorruptCheckpoint(f"checkpoint of step {self.step}: {name} is not in its manifest")

    def local(self, name: str) -> Path:
        """Path of a verified local copy, fetched if need be. Raises CorruptCheckpoint."""
        entry = self.file(name)
        path = Path(self.directory) / name
        if file_matches(path, entry, self.verified):
            return path
        if not self.url:
            raise CorruptCheckpoint(f"checkpoint of step {self.step}: {path} is missing or damaged")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f".{name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node ask for the same files
            if not file_matches(path, entry):
                try:
                    Storage(self.url).get(name, path, sha256=entry["sha256"])
                    _verified[_identity(path)] = entry["sha256"]
                except (ValueError, FileNotFoundError) as error:
                    raise CorruptCheckpoint(f"checkpoint of step {self.step}: {error}") from error
        return path


_verified: dict[Identity, str] = {}


def file_matches(path: Path, entry: dict[str, Any], verified: Mapping[Identity, str] = _verified) -> bool:
    """Whether a file has the size and sha256 of its manifest entry. One that is in `verified` is not hashed
    again."""
    try:
        identity = _identity(path)
    except FileNotFoundError:
        return False
    if identity[1] != entry["bytes"]:
        return False
    known = verified.get(identity) or _verified.get(identity)
    if known is None:
        with open(path, "rb") as file:
            known = hashlib.file_digest(file, "sha256").hexdigest()
        _verified[identity] = known
    return known == entry["sha256"]


def damaged_files(source: FoundCheckpoint) -> list[dict[str, Any]]:
    """Manifest entries of the files that are not whole in the local folder; they are hashed side by side."""
    entries = source.manifest["files"]
    folder = Path(source.directory)
    broken = []
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="hash") as pool:
        whole = pool.map(lambda entry: file_matches(folder / entry["name"], entry), entries)
        for entry, good in zip(entries, whole, strict=True):
            if not good:
                broken.append(entry)
    return broken


def verified_files(directory: str) -> dict[Identity, str]:
    hashed = {
        identity: sha256
        for identity, sha256 in _verified.items()
        if Path(identity[0]).parent == Path(directory)
    }
    return hashed


def _identity(path: Path) -> Identity:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


@dataclass(frozen=True)
class _Piece:
    rank: int
    start: int
    stop: int
    files: dict[str, str]
    """kind -> file."""


class ShardReader:
    """Flat parameters of one checkpoint, in any pieces, over however many shard files. source: a
    `FoundCheckpoint`, or the folder of a whole local checkpoint. Of files that are not here only what is read
    is fetched, and kept nowhere. Raises CorruptCheckpoint, from any method, when a file is missing or
    damaged."""

    def __init__(self, source: FoundCheckpoint | str | Path):
        self.source = source if isinstance(source, FoundCheckpoint) else open_folder(source)
        self.world_size = self.source.world_size
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._siblings: dict[tuple[int, str], set[str]] = {}
        self._sums: dict[str, str] = {}
        self._storage = Storage(self.source.url) if self.source.url else None
        self._open: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch")
        sidecars = [self._pool.submit(self._sidecar, rank) for rank in range(self.world_size)]
        for rank, sidecar in enumerate(sidecars):
            try:
                self._take(rank, sidecar.result())
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                which = f"checkpoint of step {self.source.step}: {rank_stem(rank, self.world_size)}.json"
                raise CorruptCheckpoint(f"{which} is no index: {error!r}") from error
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def _take(self, rank: int, sidecar: dict[str, Any]) -> None:
        for name, (shape, start, stop, numbers) in sidecar["index"].items():
            if not 0 <= start <= stop <= torch.Size(shape).numel():
                raise ValueError(f"{name} [{start}, {stop}) of {shape}")
            files = {}
            for kind, number in numbers.items():
                file = sidecar["files"][number]
                files[kind] = file
                self._siblings.setdefault((rank, kind), set()).add(file)
            self._shapes[name] = tuple(shape)
            self._pieces.setdefault(name, []).append(_Piece(rank, start, stop, files))
        if sidecar.get("block_bytes") == BLOCK_BYTES:
            self._sums |= sidecar.get("sha256", {})

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter. Raises CheckpointError for an unknown one."""
        if name not in self._shapes:
            raise CheckpointError(
                f"the checkpoint of step {self.source.step} has no parameter {name}: another model?"
            )
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter: "master", "exp_avg", ..."""
        self.shape(name)
        return sorted(self._pieces[name][0].files)

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of a flattened parameter, [stop - start]. A `stop` past its end is cut
        there."""
        total = torch.Size(self.shape(name)).numel()
        stop = total if stop is None else min(stop, total)
        start = min(start, stop)
        parts: list[torch.Tensor] = []
        at = start
        for piece in self._pieces[name]:
            low = max(piece.start, at)
            high = min(piece.stop, stop)
            if low >= high:
                continue
            if low != at:
                break
            parts.append(self._read_piece(piece, kind, name, low - piece.start, high - piece.start))
            at = high
        if at != stop:
            raise CorruptCheckpoint(
                f"checkpoint of step {self.source.step}: no shard holds {kind}/{name} from {at} on"
            )
        if not parts:
            return torch.empty(0)
        # A single part is given as it is: `cat` would copy it.
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_piece(self, piece: _Piece, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        key = f"{kind}/{name}"
        try:
            file = self._file(piece, kind)
            if isinstance(file, RangedShard):
                return file.read(key, start, stop)
            return file.get_slice(key)[start:stop]
        except (SafetensorError, KeyError, IndexError) as error:
            raise CorruptCheckpoint(f"checkpoint of step {self.source.step}: {key}: {error}") from error

    def stream(self, wanted: Iterable[tuple[str, str, int, int]]) -> Iterator[torch.Tensor]:
        """`read` of every (kind, name, start, stop), in order; the next ones are under way meanwhile."""
        coming: deque[Future[torch.Tensor]] = deque()
        with ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="read") as pool:
            for piece in wanted:
                coming.append(pool.submit(self.read, *piece))
                if len(coming) > PARALLEL_READS:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def extra(self, rank: int) -> dict[str, Any]:
        """What a rank saved besides (RNG states). Raises CheckpointError if the checkpoint has no such
        rank."""
        if rank >= self.world_size:
            raise CheckpointError(
                f"the checkpoint was written by {self.world_size} ranks: it has no rank {rank}"
            )
        return decode_state(self._sidecar(rank)["extra"])

    def _sidecar(self, rank: int) -> dict[str, Any]:
        return json.loads(self.source.local(f"{rank_stem(rank, self.world_size)}.json").read_text())

    def _file(self, piece: _Piece, kind: str) -> Any:
        with self._lock:
            # Who reads one of a rank's files reads them all.
            for sibling in sorted(self._siblings[piece.rank, kind]):
                if sibling not in self._open:
                    self._open[sibling] = self._pool.submit(self._opened, sibling)
        return self._open[piece.files[kind]].result()

    def _opened(self, name: str) -> Any:
        if self._storage and name in self._sums:
            entry = self.source.file(name)
            if not file_matches(Path(self.source.directory) / name, entry, self.source.verified):
                return RangedShard(self._storage, name, entry["bytes"], self._sums[name])
        return safe_open(self.source.local(name), framework="pt")


def open_folder(folder: str | Path) -> FoundCheckpoint:
    """A whole local checkpoint. Raises ConfigError if the folder holds no manifest, CorruptCheckpoint."""
    folder = Path(folder)
    try:
        manifest = unpack((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no committed checkpoint in {folder}: it has no manifest.json") from None
    if manifest is None:
        raise CorruptCheckpoint(f"{folder / 'manifest.json'} is damaged")
    source = FoundCheckpoint(manifest["step"], str(folder), "", manifest)
    return FoundCheckpoint(source.step, source.directory, "", manifest, read_state(source))


def read_state(source: FoundCheckpoint) -> dict[str, Any]:
    """The driver's state of a checkpoint. Raises CorruptCheckpoint."""
    try:
        return decode_state(json.loads(source.local("state.json").read_text()))
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpoint(
            f"checkpoint of step {source.step}: state.json is no state: {error}"
        ) from error


def fetch_rank(source: FoundCheckpoint, rank: int, world_size: int) -> None:
    """Brings what a rank is going to read to its disk, verified. Raises CorruptCheckpoint, StorageError. Of a
    checkpoint by another number of ranks the indexes: only the policy knows which slices it needs."""
    own = rank_stem(rank, world_size)
    index = f"-of-{source.world_size:05d}.json"
    names = []
    for entry in source.manifest["files"]:
        name = entry["name"]
        if name.startswith(own) or name.endswith(index):
            names.append(name)
    with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch") as pool:
        list(pool.map(source.local, names))


# --- which checkpoint to resume from ------------------------------------------------------------------------


def find_checkpoint(
    config: RunConfig,
    data_fingerprint: str,
    storage: Storage | None,
    before: int | None,
    say: Callable[[str], None],
    past: CheckpointHistory,
) -> tuple[FoundCheckpoint | None, list[int]]:
    """The newest usable checkpoint below step `before` (None: of all), and the newer ones that are passed
    over. past: the run's history, as the attempt that asks sees it. Raises ConfigError for a checkpoint of
    another configuration or dataset, where there are checkpoints and none is whole, for `resume: must`
    without one and `resume: never` with one; StorageError if the store is away and there is nothing local."""
    folder, url = local_dir(config), remote_url(config)
    here = manifests_here(folder)
    stored, sizes = _there(storage, bool(here), say, Seal.of(config))
    refuse_unsigned(config, bool(here or stored))
    counts = rewound(config, past)
    every_step = here.keys() | {step for step, _ in stored}
    here = {step: manifest for step, manifest in here.items() if counts(step, manifest.get("attempt", ""))}
    remotely = newest_of_each({key: manifest for key, manifest in stored.items() if counts(*key)})
    newest_first = sorted(every_step, reverse=True)
    before_step = config.checkpoint.before
    mode = config.checkpoint.resume
    if mode == "never" and newest_first:
        raise ConfigError(
            f"checkpoint.resume is never, but run {config.run_id} has checkpoints up to step"
            f" {newest_first[0]}: choose another run.id, or remove them"
        )
    passed = [step for step in newest_first if before is not None and step >= before]
    for step in newest_first[len(passed) :]:
        # A checkpoint may lie here, there, or both; the two may differ after a fall-back, so each is tried by
        # itself.
        options = [manifest for manifest in (here.get(step), remotely.get(step)) if manifest is not None]
        if not options:
            why = "the run went on without it, as the record of its attempts says"
            if before_step and step >= before_step:
                why = f"the run goes back to before step {before_step} (checkpoint.before)"
            say(f"step {step} is left out: {why}")
            passed.append(step)
            continue
        reason = ""
        for manifest in options if len(options) == 2 and options[0] != options[1] else options[:1]:
            inside = remote_folder(step, manifest.get("attempt", ""))
            remote = f"{url}/{inside}" if remotely.get(step) == manifest else ""
            source = FoundCheckpoint(step, str(folder / step_name(step)), remote, manifest)
            reason = _wrong(source, storage, inside, sizes)
            if reason:
                continue
            refuse_other(config, data_fingerprint, manifest, say)
            try:
                return replace(
                    source, state=read_state(source), verified=verified_files(source.directory)
                ), passed
            except CorruptCheckpoint as error:
                reason = str(error)
        say(f"step {step} cannot be used ({reason}); falling back to the one before")
        passed.append(step)
    if before_step and newest_first and newest_first[-1] >= before_step:
        raise ConfigError(
            f"run {config.run_id} has no checkpoint from before step {before_step}: the oldest is of step"
            f" {newest_first[-1]}; raise checkpoint.before, or set it to 0"
        )
    if newest_first:  # starting from scratch over them would throw the run away
        steps = ", ".join(map(str, sorted(newest_first)))
        raise ConfigError(
            f"run {config.run_id} has checkpoints of steps {steps} in {folder} {url} and none is whole: bring"
            " back what is missing (every node's files, or the store), or remove them to start from scratch"
        )
    if mode == "must":
        raise ConfigError(f"checkpoint.resume is must, but there is no checkpoint in {folder} {url}".rstrip())
    return None, passed


def _there(
    storage: Storage | None, have_local: bool, say: Callable[[str], None], seal: Seal
) -> tuple[dict[CheckpointKey, dict[str, Any]], dict[str, int]]:
    if storage is None:
        return {}, {}
    try:
        return every_manifest(storage, seal)
    except StorageError as error:
        if not have_local:
            raise  # starting from scratch because the store is away would throw the run away
        say(f"{error}: looking at local checkpoints only")
        return {}, {}


def _wrong(source: FoundCheckpoint, storage: Storage | None, inside: str, sizes: dict[str, int]) -> str:
    """Why a checkpoint cannot be used, or an empty string."""
    for entry in damaged_files(source):
        if not source.url:
            exists = (Path(source.directory) / entry["name"]).exists()
            return f"{entry['name']} is {'damaged' if exists else 'missing'}"
        key = f"{inside}/{entry['name']}"
        if sizes.get(key) != entry["bytes"] and storage is not None and storage.size(key) != entry["bytes"]:
            return f"{entry['name']} is damaged or missing, in the store too"
    return ""
