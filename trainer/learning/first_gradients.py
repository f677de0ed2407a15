"""Whether every parameter that should learn gets a gradient in a run's first update."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor


class FirstGradients:
    """Watches the gradients of the run's first update, on all ranks. A wrong backward pass leaves layers
    without any, and the loss falls all the same."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        """parameters: those that should learn, by name."""
        self._names = list(parameters)
        self._counts = torch.zeros(len(parameters) + 1, device=device, dtype=torch.float64)
        self._hooks = []
        for number, parameter in enumerate(parameters.values()):
            self._hooks.append(parameter.register_hook(partial(self._seen, number)))

    def pictured(self) -> None:
        """Says that a pass had an image: without one in any pass a vision tower has nothing to learn."""
        self._counts[-1] += 1

    def _seen(self, number: int, gradient: Tensor) -> None:
        self._counts[number] += gradient.count_nonzero()

    def missing(self) -> list[str]:
        """Ends the watch; returns the names of the parameters whose gradient was exactly 0 in all passes of
        all ranks. Collective.

        An adapter's factor A is left out, because B is 0 at the start and A gets no gradient then. If no
        parameter has a gradient, the step had nothing to teach (every advantage was 0), and none is named.
        """
        for hook in self._hooks:
            hook.remove()
        dist.all_reduce(self._counts)
        *counts, pictures = self._counts.tolist()
        if not any(counts):
            return []
        missing = []
        for name, count in zip(self._names, counts, strict=True):
            factor_a = ".lora_A." in name
            tower_without_image = "visual." in name and not pictures
            if count == 0 and not factor_a and not tower_without_image:
                missing.append(name)
        return missing
