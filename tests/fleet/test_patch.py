"""Patches of weights: no bit is lost, and damaged ones change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.fleet import patch
from trainer.fleet.patch import DenseChange, SparseChange, apply_patch, decode_patch, encode_patch

SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x7F7F, 0x3F80)
"""0, -0, subnormals, infinities, NaNs with payloads, the largest number, 1."""


def bf16(bits) -> Tensor:
    return torch.from_numpy(np.asarray(bits, np.uint16).astype(np.int16)).view(torch.bfloat16)


def cut(tensor: Tensor, cuts: list[int]) -> list[Tensor]:
    """Copies of a flat tensor's pieces."""
    at = sorted({min(c, len(tensor)) for c in cuts} | {0, len(tensor)})
    return [tensor[a:b].clone() for a, b in zip(at, at[1:], strict=False)]


def bits_of(pieces: list[Tensor]) -> bytes:
    return b"".join(piece.view(torch.uint8).numpy().tobytes() for piece in pieces if len(piece))


def patched(old: list[Tensor], new: list[Tensor]) -> SparseChange | DenseChange:
    """Asserts that the patch from old to new gives new; returns what it changes."""
    data = encode_patch(old, new)
    elements = sum(map(len, new))
    change = decode_patch(data, elements, new[0].element_size() if new else 2)
    pieces = [piece.clone() for piece in old]
    apply_patch(pieces, change)
    assert bits_of(pieces) == bits_of(new)
    return change


words = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))


@settings(max_examples=150, deadline=None)
@given(
    old=st.lists(words, max_size=60),
    changes=st.dictionaries(st.integers(0, 59), words, max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_every_pattern_of_bf16_comes_through(old, changes, cuts):
    new = [changes.get(i, word) for i, word in enumerate(old)]
    patched(cut(bf16(old), cuts), cut(bf16(new), cuts))


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=40))
def test_every_pattern_of_fp32_comes_through(words):
    old, new = [np.array([pair[i] for pair in words], np.uint32).view(np.int32) for i in (0, 1)]
    pieces = [torch.from_numpy(x).view(torch.float32) for x in (old, new)]
    assert isinstance(patched([pieces[0]], [pieces[1]]), DenseChange)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 33])
def test_chunks_end_anywhere(monkeypatch, length):
    monkeypatch.setattr(patch, "CHUNK_ELEMENTS", 16)
    old = bf16(np.arange(length) * 31 % 0xFFFF)
    for changed in ([], [0], [length - 1], [0, length - 1], list(range(length))):
        new = old.clone()
        for at in (c for c in changed if 0 <= c < length):
            new[at] = -new[at] + 1
        patched([old], [new])
        patched(cut(old, [5, 16]), cut(new, [5, 16]))


def test_wide_gaps_and_jumps_of_any_size_are_escaped():
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    new = old.clone()
    for at, value in ((254, 1e-40), (509, 3e38), (765, -3e38), (70_000, float("nan")), (99_999, -0.0)):
        new[at] = value
    change = patched([old], [new])
    assert isinstance(change, SparseChange) and change.positions.tolist() == [254, 509, 765, 70_000, 99_999]


def test_many_changes_make_it_dense():
    old = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    few, many = old.clone(), old.clone()
    few[:100] *= 2
    many[:200] *= 2
    assert isinstance(patched([old], [few]), SparseChange)
    assert isinstance(patched([old], [many]), DenseChange)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_raise_and_change_nothing(data):
    g = torch.Generator().manual_seed(1)
    old = torch.randn(400, generator=g).bfloat16()
    new = old.clone()
    new[:: data.draw(st.sampled_from([2, 40]))] *= 1.01
    good = encode_patch([old], [new])
    damaged = bytearray(good)
    match data.draw(st.sampled_from(["flip", "cut", "longer", "random", "other length"])):
        case "flip":
            damaged[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del damaged[data.draw(st.integers(0, len(good) - 1)) :]
        case "longer":
            damaged += data.draw(st.binary(min_size=1, max_size=9))
        case "random":
            damaged = bytearray(data.draw(st.binary(max_size=200)))
        case "other length":
            with pytest.raises(ValueError):
                decode_patch(good, 401, 2)
            return
    with pytest.raises(ValueError):
        decode_patch(bytes(damaged), 400, 2)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_that_the_checksum_does_not_show_raises_or_stays_inside(data):
    """As a writer with a defect would make it: the checksum is right, and what stands before it is not."""
    old = torch.randn(400, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = old.clone()
    new[:: data.draw(st.sampled_from([2, 40]))] *= 1.01
    body = bytearray(encode_patch([old], [new])[: -patch.CHECKSUM.size])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body) + patch.CHECKSUM.pack(patch.zlib.crc32(bytes(body)))
    try:
        change = decode_patch(damaged, 400, 2)
    except ValueError:
        return
    pieces = [old.clone()]
    try:
        apply_patch(pieces, change)
    except ValueError:
        assert bits_of(pieces) == bits_of([old])


def test_a_patch_of_other_weights_is_refused_where_a_number_would_overflow():
    old, new = bf16([0x0000] * 20), bf16([0x0000] * 19 + [0x7FFF])
    change = decode_patch(encode_patch([old], [new]), 20, 2)
    other = bf16([0x0001] * 20)
    with pytest.raises(ValueError, match="other weights"):
        apply_patch([other], change)
    assert bits_of([other]) == bits_of([bf16([0x0001] * 20)])


def adam_step(rate: float, elements: int) -> tuple[Tensor, Tensor]:
    """bf16 weights before and after Adam's eighth step on noise with 10% signal."""
    g = torch.Generator().manual_seed(0)
    master = torch.randn(elements, generator=g) * 0.012
    signal = torch.randn(elements, generator=g) * 0.1
    mean, square = torch.zeros(elements), torch.zeros(elements)
    before = master.bfloat16()
    for step in range(1, 9):
        before = master.bfloat16()
        gradient = signal + torch.randn(elements, generator=g)
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        master -= rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
    return before, master.bfloat16()


@pytest.mark.parametrize("rate", [5e-7, 1e-6, 3e-6])
def test_a_change_at_the_recipes_learning_rates_takes_a_byte_and_a_half(rate):
    """An index and a value of each, as a sparse tensor has them, take 6 bytes."""
    before, after = adam_step(rate, 100_000)
    change = patched([before], [after])
    assert isinstance(change, SparseChange) and 0.002 < len(change.positions) / len(after) < 0.1
    assert 1.0 < len(encode_patch([before], [after])) / len(change.positions) < 1.7
