"""Seeds by what is seeded, so that a resumed run draws what the uninterrupted one would have drawn."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^31) from the identity of the thing: `seed_of(run_seed, step, prompt_id)`."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
