"""Splits rows into train and validation by content: nearly equal images are never on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from data_prep.ingest.images import LOOK_SIDE, NEAR_LEVELS

BLOCK_PAIRS = 1 << 20
"""Pairs that are compared at once, which bounds the memory: 3 bytes each, 40 if all are near."""
FEW = 0.02
"""Share of a block's pairs below which they are listed and compared one by one."""


def stacked(looks: Sequence[str]) -> np.ndarray:
    """Thumbnails in hex -> [images, LOOK_SIDE^2] uint8."""
    levels = np.frombuffer(b"".join(map(bytes.fromhex, looks)), dtype=np.uint8)
    return levels.reshape(-1, LOOK_SIDE * LOOK_SIDE)


def near_pairs(
    left: np.ndarray, right: np.ndarray, within: int = NEAR_LEVELS, joined: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """All pairs (i, j) whose thumbnails differ by at most `within` at every place, a block of rows i at
    a time.

    Exact: every pair is compared, at the place that varies most first. A whole block of pairs is
    compared place after place until few are still near; these are listed and compared at the other
    places. Memory is bounded by BLOCK_PAIRS.

    Args:
        left: [n, places] uint8.
        right: [m, places] uint8.
        within: levels.
        joined: [n] labels, if `left` is `right`: only pairs of i < j are given, and none whose labels are
            equal when its block begins. The caller may change them between blocks.

    Yields:
        [pairs, 2] int64.
    """
    if not len(left) or not len(right):
        return
    places = np.argsort(-right[:: len(right) // 4096 + 1].astype(np.float32).var(axis=0), kind="stable")
    b = np.ascontiguousarray(right[:, places].T)
    a = b if left is right else np.ascontiguousarray(left[:, places].T)
    # Cut first, since uint8 would wrap around.
    low = np.maximum(a, within) - within
    high = np.minimum(a, 255 - within) + within
    step = max(1, BLOCK_PAIRS // len(right))
    for start in range(0, len(left), step):
        rows = slice(start, start + step)
        first = 0 if joined is None else start
        near = np.ones((len(left[rows]), len(right) - first), dtype=bool)
        place = 0
        if joined is not None:
            near = joined[rows, None] != joined[None, first:]
        while place < len(places) and np.count_nonzero(near) > FEW * near.size:
            near &= b[place, None, first:] >= low[place, rows, None]
            near &= b[place, None, first:] <= high[place, rows, None]
            place += 1
        i, j = np.nonzero(near)
        i, j = i + start, j + first
        for other in range(place, len(places)):
            keep = (b[other, j] >= low[other, i]) & (b[other, j] <= high[other, i])
            if not keep.all():
                i, j = i[keep], j[keep]
        pairs = np.stack([i, j], axis=1)
        yield pairs if joined is None else pairs[i < j]


def join(labels: np.ndarray, pairs: np.ndarray) -> None:
    """Makes one set of each pair, in place: a label is the smallest member of its set.

    Labels [n] point at members of lower index until each points at itself or at one that does.
    """
    first = pairs[:, 0]
    second = pairs[:, 1]
    while len(first):
        left = labels[first]
        right = labels[second]
        apart = left != right
        first = first[apart]
        second = second[apart]
        low = np.minimum(left, right)[apart]
        high = np.maximum(left, right)[apart]
        np.minimum.at(labels, high, low)
        while True:
            shorter = labels[labels]
            if np.array_equal(shorter, labels):
                break
            labels[:] = shorter


def groups_of(
    rows: Sequence[Sequence[str]], questions: Sequence[bytes], look_of: dict[str, str]
) -> list[str]:
    """A group key for every row: rows share it if they share an image, or a question if they have none.

    Args:
        rows: sha256 of each row's images.
        questions: hash of each row's question, used where it has no image.
        look_of: sha256 -> thumbnail in hex.

    Returns:
        For each row the smallest content hash of its group, so that a group keeps its key while others come
        and go.
    """
    images = sorted(set(chain.from_iterable(rows)))
    number = {sha: i for i, sha in enumerate(images)}
    # Images with equal thumbnails are joined first: there can be many, and they need not be compared.
    unique, kind = np.unique(stacked([look_of[sha] for sha in images]), axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    looks = np.arange(len(unique))
    for pairs in near_pairs(unique, unique, joined=looks):
        join(looks, pairs)
    labels = np.arange(len(images))
    leader = np.full(len(unique), len(images))
    np.minimum.at(leader, looks[kind], labels)
    join(labels, np.stack([leader[looks[kind]], labels], axis=1))
    same_row = []
    for row in rows:
        for sha in row[1:]:
            same_row.append((number[row[0]], number[sha]))
    join(labels, np.array(same_row, dtype=np.int64).reshape(-1, 2))
    keys = []
    for row, question in zip(rows, questions, strict=True):
        keys.append(images[labels[number[row[0]]]] if row else question.hex())
    return keys


def validation_groups(keys: Sequence[str], share: float, seed: int) -> set[str]:
    """The groups that go to validation. A hash of its key decides, so that new rows do not move old ones.

    A group of more than a tenth of the wanted validation rows stays in training: one family of images
    would be all that is validated on. Where that leaves none, the smallest group is taken, if it is not the
    only one.
    """
    sizes: dict[str, int] = {}
    for key in keys:
        sizes[key] = sizes.get(key, 0) + 1
    draws: dict[str, float] = {}
    for key in sizes:
        draws[key] = int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") / 2**64
    largest = max(1, int(share * len(keys) / 10))
    chosen = {key for key, size in sizes.items() if draws[key] < share and size <= largest}
    if share and not chosen and len(sizes) > 1:
        return {min(sizes, key=lambda key: (sizes[key], draws[key]))}
    return chosen
