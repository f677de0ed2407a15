"""The weights that a worker has, on its host, and which version they are: how they begin, with the pretrained
model or a checkpoint of the run, and how they follow the trainer's.

Patches are applied here, never inside vLLM: the engine gets whole tensors by the trainer's own way
(trainer/weights/in_process.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.layout import local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import CorruptCheckpoint, unpack
from trainer.checkpoint.shard_reader import FoundCheckpoint, ShardReader
from trainer.config import RunConfig
from trainer.fleet import patch
from trainer.fleet.fleet_records import Anchor, Layout, RankPatch, WeightVersion
from trainer.fleet.objects import Objects, first_lineage, next_lineage, version_key
from trainer.learning import lora
from trainer.storage import hub
from trainer.storage.seal import ForgedObject, Seal
from trainer.storage.storage import Storage
from trainer.system.errors import ObjectTooLarge

FETCHED_AT_ONCE = 16


class HostModel:
    def __init__(self, model: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        self.tensors: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
        """Every parameter by the policy's names, adapters too."""
        self._base, self._adapted = lora.adapters(self.tensors, model)
        self._adapters = {name: tensor.clone() for name, tensor in self.tensors.items() if ".lora_" in name}
        """The adapters as they begin."""

    @property
    def whole(self) -> bool:
        """Whether it has weights; not after `begin_anew` has failed."""
        return all(tensor.numel() for tensor in self.tensors.values())

    def begin_anew(self, config: RunConfig) -> None:
        """Brings the values of `load_pretrained` back. With adapters only these have changed; else the model
        is read again, in the place of what is here: two copies of it may not fit the host."""
        if self._adapters:
            for name, tensor in self._adapters.items():
                self.tensors[name].copy_(tensor)
            return
        for tensor in self.tensors.values():
            tensor.data = tensor.new_empty(0)
        for name, tensor in load_pretrained(config).tensors.items():
            self.tensors[name].data = tensor

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own parameters by its own names, adapters merged in."""
        for name, tensor in self._base:
            yield name, lora.merged_weight(tensor, self._adapted.get(name))


@torch.no_grad()
def load_pretrained(config: RunConfig) -> HostModel:
    """The pretrained model in the run's type, with the run's adapters as they begin. The classes that load it
    are those that load the policy, so that names and values are the policy's own."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = config.model
    if hub.from_hub(config):
        hub.fetch_files(config, hub.weight_files(config))
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    arguments: dict[str, Any] = {"dtype": dtype} | ({"revision": model.revision} if model.revision else {})
    try:
        loaded = AutoModelForImageTextToText.from_pretrained(model.path, **arguments)
    except ValueError:  # not a vision-language architecture
        loaded = AutoModelForCausalLM.from_pretrained(model.path, **arguments)
    if config.lora.rank:
        lora.inject_adapters(loaded, config.lora, config.run.seed)
    return HostModel(loaded)


@torch.no_grad()
def fill_from_anchor(model: HostModel, config: RunConfig, anchor: Anchor) -> None:
    """Brings an anchor's weights into `model`, which holds the pretrained model or a later version of it. A
    checkpoint holds the trained parameters in fp32: rounded they are the weights that were published. Its
    manifest is signed, and holds the sha256 of the files that hold the sums of every block that is read.
    Raises CorruptCheckpoint, StorageError; FileNotFoundError where the checkpoint is gone."""
    if anchor.kind == "model" or not model.whole:
        model.begin_anew(config)
    if anchor.kind == "model":
        return
    inside = remote_folder(anchor.version, anchor.attempt)
    folder = f"{remote_url(config)}/{inside}"
    manifest = unpack(Storage(folder).get_bytes("manifest.json"), Seal.of(config), inside)
    if manifest is None or manifest["step"] != anchor.version:
        raise CorruptCheckpoint(f"{folder}/manifest.json is damaged, or was not signed with the run's key")
    here = Path(local_dir(config)) / f"{step_name(anchor.version)}-{anchor.attempt}"
    reader = ShardReader(FoundCheckpoint(anchor.version, str(here), folder, manifest))
    for name in reader.names():
        model.tensors[name].view(-1).copy_(reader.read("master", name))


class WeightsDiverged(RuntimeError):
    """The weights are not those that the trainer published, although every patch was."""


def read_version(objects: Objects, number: int, lineage: str) -> WeightVersion:
    """The manifest of a version. Raises FileNotFoundError, and Forged where it is not what its name says."""
    key = version_key(number, lineage)
    version = objects.get_record(key, WeightVersion)
    if version is None:
        raise FileNotFoundError(f"{key}: not in {objects.storage.url}")
    made = next_lineage(version.parent_lineage, [patch.sha256 for patch in version.patches])
    if (version.number, version.lineage) != (number, lineage) or made != lineage:
        raise ForgedObject(f"{key} is of another version than its name says")
    return version


def weights_digest(pieces: Sequence[Tensor]) -> str:
    """sha256 of the content of flat tensors, one after the other."""
    total = hashlib.sha256()
    for piece in pieces:
        if len(piece):
            total.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


class WeightMirror:
    """A `WeightSource` of one machine. tensors: the pretrained model's, by the policy's names."""

    def __init__(
        self,
        objects: Objects,
        layout: Layout,
        tensors: dict[str, Tensor],
        fill: Callable[[Anchor], None],
        bucket_bytes: int,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        """fill: brings an anchor's weights into the tensors. weights: what an engine takes of them, by its
        names."""
        self.objects, self.layout = objects, layout
        self.tensors = tensors
        self._weights = weights
        self._fill, self._bucket_bytes = fill, bucket_bytes
        self._as_loaded = True
        """Whether the tensors hold the pretrained model's values, which then need not be read again."""
        self.version, self.lineage = -1, ""
        self.anchors_read = 0
        self.dirty = True
        """Whether the tensors may be between two versions; then they are read anew."""

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """`WeightSource.groups`."""
        group: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._weights():
            if group and size + tensor.nbytes > self._bucket_bytes:
                yield group
                group, size = [], 0
            group.append((name, tensor))
            size += tensor.nbytes
        if group:
            yield group

    def pieces(self, rank: int) -> list[Tensor]:
        return [self.tensors[name].view(-1)[start:stop] for name, start, stop in self.layout[rank]]

    def digests(self) -> list[str]:
        return [weights_digest(self.pieces(rank)) for rank in range(len(self.layout))]

    def to(self, number: int, lineage: str, anchors: Sequence[Anchor]) -> None:
        """Brings the tensors to a version: forward by its patches, from an anchor where these do not lead on
        from what is held, as on the way back. Raises FileNotFoundError where the store has no way there,
        Forged, Diverged, and ValueError for a damaged patch, with the tensors as they were."""
        if self.lineage == lineage and not self.dirty:
            return
        known = {anchor.lineage: anchor for anchor in anchors}
        way, start = self._way(number, lineage, known)
        if self.dirty or self.lineage != start:
            self._begin(known[start])
        for version in reversed(way):
            self._apply(version)
            self.version, self.lineage = version.number, version.lineage
            self._compare(version.digests)

    def _way(
        self, number: int, lineage: str, anchors: Mapping[str, Anchor]
    ) -> tuple[list[WeightVersion], str]:
        """The versions from the wanted one back to what is held, else to an anchor; and what they begin
        with."""
        held, held_number = ("", math.inf) if self.dirty else (self.lineage, self.version)
        way: list[WeightVersion] = []
        from_anchor: tuple[list[WeightVersion], str] | None = None
        while lineage != held:
            if lineage in anchors and from_anchor is None:
                from_anchor = list(way), lineage
            if from_anchor and number <= held_number:
                return from_anchor
            try:
                version = read_version(self.objects, number, lineage)
            except FileNotFoundError:
                if from_anchor is None:
                    raise
                return from_anchor
            way.append(version)
            number, lineage = version.parent, version.parent_lineage
        return way, held

    def _begin(self, anchor: Anchor) -> None:
        if self._is_here(anchor):
            self.lineage = anchor.lineage
            return
        self.dirty = True
        if not (self._as_loaded and anchor.kind == "model"):
            self._fill(anchor)
        self._as_loaded = False
        self.anchors_read += 1
        if anchor.kind == "model" and first_lineage("model", 0, self.digests()) != anchor.lineage:
            raise WeightsDiverged(
                "the trainer began with other weights: this machine's files of the model differ"
            )
        self.version, self.lineage = anchor.version, anchor.lineage
        self.dirty = False

    def _is_here(self, anchor: Anchor) -> bool:
        """Whether the tensors hold a checkpoint's weights: a new attempt calls by another name what this
        mirror has held for long."""
        if self.dirty or anchor.kind == "model" or self.version != anchor.version:
            return False
        return first_lineage(anchor.kind, anchor.version, self.digests()) == anchor.lineage

    def _apply(self, version: WeightVersion) -> None:
        """Fetches and decodes all patches of a version before the first of them changes anything."""
        if len(version.patches) != len(self.layout):
            raise ForgedObject(f"version {version.number} has {len(version.patches)} patches")
        changes = []
        with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
            for rank, data in enumerate(pool.map(self._fetch, version.patches)):
                pieces = self.pieces(rank)
                width = pieces[0].element_size() if pieces else 2
                changes.append(patch.decode_patch(data, sum(map(len, pieces)), width))
        self.dirty = True
        for rank, change in enumerate(changes):
            patch.apply_patch(self.pieces(rank), change)
        self.dirty = False

    def _fetch(self, published: RankPatch) -> bytes:
        try:
            data = self.objects.storage.get_bytes(published.key, published.bytes)
        except ObjectTooLarge as error:
            raise ForgedObject(f"{error}: it is not the patch that was published") from error
        if hashlib.sha256(data).hexdigest() != published.sha256:
            raise ForgedObject(f"{published.key} is not the patch that was published")
        return data

    def _compare(self, digests: Sequence[str]) -> None:
        if digests and self.digests() != list(digests):
            self.dirty = True
            raise WeightsDiverged(
                f"version {self.version} is not what the trainer published, although every patch was: the"
                " machine's memory is at fault, or its model's files"
            )
