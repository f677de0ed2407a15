"""What carries weights from a learner to a sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """All weights of one version, a group of layers at a time."""

    @property
    def version(self) -> int:
        """Number of training steps after which the policy had these weights."""

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in the model's own dtype under their Hugging Face names, every parameter once.

        A group's tensors are valid only until the next group is asked for: the caller copies what it keeps.
        Inside a rank's process this is collective: all ranks go through the groups together.
        """
