"""The manifest of a checkpoint: what it is of, and which files make it whole. Needs no training stack."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from trainer.checkpoint.layout import MANIFEST, CheckpointKey, Counts, count_every_checkpoint, step_of
from trainer.config import RunConfig, fingerprint, resume_view
from trainer.config.run_store import CHECKPOINTS
from trainer.storage.attempt_record import attempt_number
from trainer.storage.seal import OPEN, Seal
from trainer.storage.storage import Storage
from trainer.system.errors import ObjectTooLarge
from trainer.system.records import Count, Line, convert_record

Manifests = dict[int, dict[str, Any]]
"""step -> manifest."""

MANIFEST_FILE = "manifest.json"
MOST_BYTES = 16 << 20
"""The largest manifest that is read from a store."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message says what to change, where something can be changed."""


class CorruptCheckpoint(CheckpointError):
    """A file of a committed checkpoint is missing or has another sha256: fall back to the checkpoint before
    it."""


class ManifestFile(Struct):
    """One file, whose name leads out of no folder."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z", max_length=255)]
    bytes: Count
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ManifestForm(Struct):
    """What every reader of a manifest relies on."""

    run_id: Line
    step: Count
    world_size: Annotated[int, Meta(ge=1)]
    bytes: Count
    files: list[ManifestFile]
    score: float | None
    data_fingerprint: Line
    code_fingerprint: Line
    config: dict[str, Any]
    attempt: Annotated[str, Meta(pattern=r"^([0-9]{1,8}-[0-9a-f]{6})?\Z")] = ""
    """An attempt's name, or nothing: the layout before attempts had folders."""
    ahead: list[Count] = []
    before: Count = 0


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as the manifest lists it."""

    name: str
    bytes: int
    sha256: str
    uploaded: bool = False
    """Whether the file is in the store. False without a store, and where the upload failed until its
    retries were used up."""
    error: str = ""


def rank_stem(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}"


def code_fingerprint() -> str:
    """sha256 of the trainer's own sources. A difference is told on resume, never refused."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def manifest_of(
    config: RunConfig, step: int, records: Sequence[FileRecord], score: float | None, about: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a checkpoint. about: its attempt, the fingerprint of its data, the step that its run
    was taken back to (`before`), and in `ahead` the steps after it that were sampled before it, if any."""
    worlds: set[str] = set()
    files = []
    size = 0
    for record in records:
        if record.name.startswith("rank-"):
            worlds.add(record.name.partition("-of-")[2][:5])
        files.append({"name": record.name, "bytes": record.bytes, "sha256": record.sha256})
        size += record.bytes
    return about | {
        "format": "spotrl-checkpoint-1",
        "run_id": config.run_id,
        "step": step,
        "world_size": int(worlds.pop()) if len(worlds) == 1 else config.placement.world_size,
        "bytes": size,
        "score": score,
        "fingerprint": fingerprint(config),
        "config": resume_view(config),
        "code_fingerprint": code_fingerprint(),
        "files": files,
    }


def pack(manifest: dict[str, Any], seal: Seal = OPEN, folder: str = "") -> bytes:
    """The bytes of `manifest.json`: the manifest and its own sha256. seal: that of the run, for a manifest
    that goes to `folder` of the store."""
    outer = {"manifest": manifest, "sha256": _digest(manifest)}
    return json.dumps(seal.signed_json(_place(folder), outer), indent=1, sort_keys=True).encode()


def unpack(data: bytes, seal: Seal = OPEN, folder: str = "") -> dict[str, Any] | None:
    """The manifest in the bytes of a `manifest.json`; None if they are not whole, name what no manifest
    names, or were not signed by `seal` for `folder` of the store."""
    try:
        outer = json.loads(data)
        seal.check_json(_place(folder), outer)
        manifest = outer["manifest"]
        whole = _digest(manifest) == outer["sha256"]
        return (
            manifest if whole and _is_whole(convert_record(manifest, ManifestForm, MANIFEST_FILE)) else None
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _place(folder: str) -> str:
    return f"{CHECKPOINTS}/{folder}/manifest.json"


def _is_whole(form: ManifestForm) -> bool:
    """Whether the files that a manifest lists make a checkpoint: each named once, one of every rank."""
    names = {entry.name for entry in form.files}
    # The number of ranks is compared with the files first: it may be too large to make a name for each.
    if not form.world_size <= len(form.files) == len(names):
        return False
    ranks = (f"{rank_stem(rank, form.world_size)}.json" for rank in range(form.world_size))
    return "state.json" in names and names.issuperset(ranks)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def manifests_here(folder: Path, counts: Counts = count_every_checkpoint) -> Manifests:
    """The committed checkpoints of a local folder, of those that count."""
    manifests = {}
    for path in folder.glob("step-*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # one that is being dropped
            manifest = unpack(path.read_bytes())
            if manifest is None or manifest["step"] != step_of(path.parent.name):
                continue
            if counts(manifest["step"], manifest.get("attempt", "")):
                manifests[manifest["step"]] = manifest
    return manifests


def manifests_there(
    storage: Storage, counts: Counts = count_every_checkpoint, seal: Seal = OPEN
) -> tuple[Manifests, dict[str, int]]:
    """The committed checkpoints of a store that count, of each step the newest attempt's; and {key: bytes} of
    everything there."""
    manifests, sizes = every_manifest(storage, seal)
    return newest_of_each({key: manifest for key, manifest in manifests.items() if counts(*key)}), sizes


def every_manifest(
    storage: Storage, seal: Seal = OPEN
) -> tuple[dict[CheckpointKey, dict[str, Any]], dict[str, int]]:
    """The committed checkpoints of a store, those of older attempts first; and {key: bytes} of everything
    there. seal: of the run, which has signed them if it has a key."""
    sizes = dict(storage.list())
    manifests = {}
    found_keys = filter(None, map(MANIFEST.fullmatch, sizes))
    for match in sorted(found_keys, key=lambda match: attempt_number(match[2] or "")):  # the newest last
        with contextlib.suppress(FileNotFoundError, ObjectTooLarge):  # one that is being dropped, or is none
            data = storage.get_bytes(match[0], MOST_BYTES)
            manifest = unpack(data, seal, match[0].removesuffix("/manifest.json"))
            key = (step_of(match[1]) or 0, match[2] or "")
            if manifest is not None and (manifest["step"], manifest.get("attempt", "")) == key:
                manifests[key] = manifest
    return manifests, sizes


def newest_of_each(oldest_first: Mapping[CheckpointKey, dict[str, Any]]) -> Manifests:
    """The newest attempt's checkpoint of each step. oldest_first: by attempt."""
    return {step: manifest for (step, _), manifest in oldest_first.items()}
