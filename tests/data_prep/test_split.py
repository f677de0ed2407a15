"""Groups of near-identical images, found exactly, and the split that keeps them together."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from data_prep.checks.split import groups_of, join, near_pairs, stacked, validation_groups
from data_prep.ingest.images import LOOK_SIDE

PLACES = LOOK_SIDE * LOOK_SIDE


def brute(left: np.ndarray, right: np.ndarray, within: int) -> set[tuple[int, int]]:
    apart = np.abs(left[:, None].astype(int) - right[None].astype(int)).max(axis=2)
    return {(int(i), int(j)) for i, j in zip(*np.nonzero(apart <= within), strict=True)}


def listed(left: np.ndarray, right: np.ndarray, joined=None) -> set[tuple[int, int]]:
    return {(int(i), int(j)) for pairs in near_pairs(left, right, 50, joined) for i, j in pairs}


@pytest.mark.parametrize("block", [1 << 22, 100])
def test_near_pairs_are_exactly_those_of_brute_force(monkeypatch, block):
    monkeypatch.setattr("data_prep.checks.split.BLOCK_PAIRS", block)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (30, PLACES), dtype=np.uint8)
    shifted = (base[:20].astype(int) + rng.integers(-60, 61, (20, 1))).clip(0, 255).astype(np.uint8)
    both = np.concatenate([base, shifted])
    expected = brute(both, both, 50)
    assert listed(both, both, joined=np.arange(50)) == {(i, j) for i, j in expected if i < j}
    assert listed(base, shifted) == brute(base, shifted, 50)
    assert len(expected) > 50  # the shifted ones count, or the test shows nothing


def test_the_limit_is_inclusive_and_differences_do_not_wrap():
    looks = np.array([[0] * PLACES, [50] * PLACES, [101] * PLACES, [255] * PLACES], dtype=np.uint8)
    assert listed(looks, looks, joined=np.arange(4)) == {(0, 1)}
    assert listed(looks[:0], looks) == set()


def look(level: int) -> str:
    return bytes([level] * PLACES).hex()


def test_rows_share_a_group_through_chains_of_near_images_and_common_rows():
    looks = {"a": look(0), "b": look(40), "c": look(80), "d": look(200), "e": look(255), "f": look(0)}
    rows = [("a",), ("c",), ("b",), ("d",), ("d", "a"), ("e",), ("f",), ()]
    keys = groups_of(rows, [b"q"] * 8, looks)
    assert keys == ["a"] * 5 + ["e", "a", b"q".hex()]


def test_stacked_keeps_order_and_levels():
    assert stacked([look(7), look(255)])[:, 0].tolist() == [7, 255]


def test_the_share_is_met_and_large_families_stay_in_training():
    keys = [str(i) for i in range(4000)] + ["family"] * 600
    chosen = validation_groups(keys, 0.1, 0)
    rows = sum(key in chosen for key in keys)
    assert "family" not in chosen and 300 < rows < 500
    assert all("family" not in validation_groups(keys, 0.1, seed) for seed in range(30))
    assert validation_groups(keys, 0.0, 0) == set()


@pytest.mark.parametrize("rows", [2, 10, 100])
def test_a_small_set_holds_something_out_unless_all_its_images_are_alike(rows):
    """One draw in seven would choose none of 100 rows at a share of 0.02."""
    for seed in range(30):
        alone = [str(i) for i in range(rows)]
        assert 1 <= len(validation_groups(alone, 0.02, seed)) < rows
        in_pairs = [str(i // 2) for i in range(2 * rows)]
        assert 1 <= len(validation_groups(in_pairs, 0.02, seed)) < rows
        assert validation_groups(["one"] * rows, 0.02, seed) == set()


def test_joining_pairs_gives_the_connected_components():
    rng = np.random.default_rng(1)
    for pairs_of in (30, 60, 200):
        pairs = rng.integers(0, 100, (pairs_of, 2))
        labels = np.arange(100)
        for part in np.array_split(pairs, 4):
            join(labels, part)
        expected = list(range(100))
        for _ in range(100):
            for i, j in pairs.tolist():
                expected[i] = expected[j] = min(expected[i], expected[j])
        assert labels.tolist() == expected


def test_a_large_family_costs_little_memory_and_no_list_of_its_pairs():
    """12,000 look-alikes have 72 million pairs: 1.1 GiB as a list."""
    rng = np.random.default_rng(2)
    base = rng.integers(60, 190, PLACES)
    family = (base + rng.integers(-20, 21, (12_000, PLACES))).astype(np.uint8)
    looks = {f"{i:06d}": one.tobytes().hex() for i, one in enumerate(family)}
    tracemalloc.start()
    keys = groups_of([(name,) for name in looks], [b"q"] * len(looks), looks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(keys) == {"000000"} and peak < 400 << 20
