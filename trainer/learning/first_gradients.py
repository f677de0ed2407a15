"""Whether every parameter that should learn gets a gradient in a run's first update."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithm.batching import MicroBatch


class FirstGradients:
    """Watches the gradients of the run's first update, on all ranks. A wrong backward pass leaves layers
    without any, and the loss falls all the same."""

    def __init__(
        self, parameters: Mapping[str, Tensor], device: torch.device, image_token_id: int = -1
    ) -> None:
        """parameters: those that should learn, by name. image_token_id: -1 for a model without images."""
        self._image_token_id = image_token_id
        self._names = list(parameters)
        self._counts = torch.zeros(len(parameters) + 1, device=device, dtype=torch.float64)
        self._hooks = []
        for number, parameter in enumerate(parameters.values()):
            self._hooks.append(parameter.register_hook(partial(self._seen, number)))

    def look(self, batch: MicroBatch, advantages: Tensor) -> None:
        """Notes whether a pass teaches something about an image: whether any sample with one has an advantage
        other than 0. Without such a pass a vision tower has nothing to learn."""
        # A row is [prompt | completion | completion | prompt | ...], and positions begin anew at each prompt.
        group = (batch.position_ids == 0).all(0)[0].cumsum(0)
        pictured = group[batch.input_ids[0] == self._image_token_id]
        learned = group[batch.logits_at[advantages != 0]]
        self._counts[-1] += torch.isin(learned, pictured).any()

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
        *counts, teaching_images = self._counts.tolist()
        if not any(counts):
            return []
        missing = []
        for name, count in zip(self._names, counts, strict=True):
            factor_a = ".lora_A." in name
            tower_without_image = "visual." in name and not teaching_images
            if count == 0 and not factor_a and not tower_without_image:
                missing.append(name)
        return missing
