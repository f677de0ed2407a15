"""Holes in the heap go back to the kernel, once they are worth it."""

from trainer.engine.heap import SLACK_BYTES, Heap, resident_bytes


def holes() -> list[bytearray]:
    """Twice the slack in blocks too small for a mapping of their own, of which every eighth stays."""
    blocks = [bytearray(b"x" * (64 << 10)) for _ in range(SLACK_BYTES >> 15)]
    return blocks[::8]


def test_holes_are_given_back_when_they_are_worth_it():
    heap = Heap()
    heap.trim()
    before = resident_bytes()
    assert not heap.trim(), "nothing has grown"
    kept = holes()
    grown = resident_bytes()
    assert grown > before + SLACK_BYTES, "the C library keeps the pages"
    assert heap.trim() and resident_bytes() < grown - SLACK_BYTES
    assert all(block == b"x" * (64 << 10) for block in kept) and not heap.trim()
