"""The weights that a worker has, on its host, and which version they are.

Patches are applied here, never inside vLLM: the engine gets whole tensors by the trainer's own way
(trainer/weights/in_process.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from trainer.fleet import patch
from trainer.fleet.fleet_records import Anchor, Layout, RankPatch, WeightVersion
from trainer.fleet.objects import Objects, first_lineage, next_lineage, version_key
from trainer.storage.seal import ForgedObject
from trainer.system.errors import ObjectTooLarge

KEPT_VERSIONS = 256
"""Manifests of versions that a mirror remembers it has come through."""
FETCHED_AT_ONCE = 16
"""Ranks whose patches of a version are fetched at a time."""


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
        weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        as_loaded: bool = False,
    ) -> None:
        """fill: brings an anchor's weights into the tensors (`starting_weights.py`). weights: what an engine
        takes of them, by its names; None: they are that themselves. as_loaded: whether the tensors
        hold the pretrained model's values, which then need not be read again."""
        self.objects, self.layout = objects, layout
        self.tensors = tensors
        self._weights = weights or tensors.items
        self._fill, self._bucket_bytes = fill, bucket_bytes
        self._as_loaded = as_loaded
        self.version, self.lineage = -1, ""
        self.fetched_bytes = 0
        """Patches read so far."""
        self.anchors_read = 0
        self.dirty = True
        """Whether the tensors may be between two versions; then they are read anew."""
        self._behind: list[WeightVersion] = []
        """Versions that the mirror came through, the newest last; they lead back."""

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
        """Views of what a rank holds."""
        return [self.tensors[name].view(-1)[start:stop] for name, start, stop in self.layout[rank]]

    def digests(self) -> list[str]:
        """The content of each rank's shard."""
        return [weights_digest(self.pieces(rank)) for rank in range(len(self.layout))]

    def follow(self, layout: Layout) -> None:
        """Goes on with a new attempt, whose ranks may share the weights out differently.

        Where they do, patches of older versions are for the older layout, and the way back ends here.
        """
        if layout != self.layout:
            self._behind.clear()
        self.layout = layout

    def to(self, number: int, lineage: str, anchors: Sequence[Anchor]) -> None:
        """Brings the tensors to a version: forward by its patches, or back by undoing them; from an anchor
        where neither leads there.

        Raises FileNotFoundError where the store has no way there, Forged, Diverged, and ValueError for a
        damaged patch, with the tensors as they were.
        """
        if self.lineage == lineage and not self.dirty:
            return
        known = {anchor.lineage: anchor for anchor in anchors}
        way = self._way(number, lineage, set(known))
        start = way[-1].parent_lineage if way else lineage
        if start not in self._reachable():
            self._begin(known[start])
        while self.lineage != start:
            self._undo()
        for version in reversed(way):
            self._apply(version, 1)
            self._behind = [*self._behind[1 - KEPT_VERSIONS :], version]
            self.version, self.lineage = version.number, version.lineage
            self._compare(version.digests)

    def _reachable(self) -> set[str]:
        """Lineages that undoing leads to."""
        return set() if self.dirty else {self.lineage, *(version.parent_lineage for version in self._behind)}

    def _way(self, number: int, lineage: str, anchors: set[str]) -> list[WeightVersion]:
        """The versions from the wanted one back to the first whose parent is held, else to an anchor."""
        reachable = self._reachable()
        way: list[WeightVersion] = []
        to_anchor: list[WeightVersion] | None = None
        while lineage not in reachable:
            if lineage in anchors and to_anchor is None:
                to_anchor = list(way)
                if not reachable:
                    break
            try:
                version = read_version(self.objects, number, lineage)
            except FileNotFoundError:
                if to_anchor is None:
                    raise
                return to_anchor
            way.append(version)
            number, lineage = version.parent, version.parent_lineage
        return way if lineage in reachable or to_anchor is None else to_anchor

    def _is_here(self, anchor: Anchor) -> bool:
        """Whether the tensors hold a checkpoint's weights, perhaps after newer versions were undone: a new
        attempt calls by another name what this mirror has held for long."""
        try:
            while not self.dirty and self._behind and self.version > anchor.version:
                self._undo()
        except (FileNotFoundError, ValueError):  # its patches are gone, or not what was published
            return False
        if self.dirty or self.version != anchor.version:
            return False
        return first_lineage(anchor.kind, anchor.version, self.digests()) == anchor.lineage

    def _begin(self, anchor: Anchor) -> None:
        if anchor.kind == "checkpoint" and self._is_here(anchor):
            self._behind.clear()
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
        self._behind.clear()
        self.version, self.lineage = anchor.version, anchor.lineage
        self.dirty = False

    def _undo(self) -> None:
        version = self._behind[-1]
        self._apply(version, -1)
        self._behind.pop()
        self.version, self.lineage = version.parent, version.parent_lineage

    def _apply(self, version: WeightVersion, sign: int) -> None:
        """Fetches and decodes all patches of a version before the first of them changes anything."""
        if len(version.patches) != len(self.layout):
            raise ForgedObject(f"version {version.number} has {len(version.patches)} patches")
        changes = []
        with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
            for rank, data in enumerate(pool.map(self._fetch, version.patches)):
                pieces = self.pieces(rank)
                width = pieces[0].element_size() if pieces else 2
                self.fetched_bytes += len(data)
                changes.append(patch.decode_patch(data, sum(map(len, pieces)), width))
        self.dirty = True
        for rank, change in enumerate(changes):
            patch.apply_patch(self.pieces(rank), change, sign)
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
