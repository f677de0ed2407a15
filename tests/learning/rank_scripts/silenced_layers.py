"""A rank whose backward pass has no gradient for some parameters. Runs inside scenarios.py; not a test
itself."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.learning.one_rank import OneRank, trace, trainable
from trainer.learning.distributed import DistributedLearner
from trainer.learning.learner_part import LearnerPart


class OnlyRank:
    """`Ranks` of one rank, which lives in this process."""

    world_size = 1

    def __init__(self, part: LearnerPart) -> None:
        self.part = part

    def each(self, method: Any, calls: list[tuple]) -> list[Any]:
        return [method(self.part, *calls[0])]

    def all(self, method: Any, *arguments: Any) -> list[Any]:
        return self.each(method, [arguments])

    def first(self, method: Any) -> Any:
        return method(self.part)


def inference_only(module: Any, given: Any, output: Tensor) -> Tensor:
    """What a layer returns whose kernel has no backward pass, as bitsandbytes' packed weights have none."""
    return output.detach()


def silenced_layers(config, rank, port):
    """Two updates by the driver's learner, with a layer that has no backward pass and without; the metric of
    each, and what the driver printed."""
    worker = OneRank(replace(config, method="sft"))
    worker.process.set_rank(rank, rank, "127.0.0.1", port)
    out: dict = {}
    answer = worker.prompter.tokenizer("12")["input_ids"]
    batch = trainable([trace(row, worker.prompt_ids(row), answer) for row in range(4)], [1.0] * 4)
    learner = DistributedLearner(worker.config, OnlyRank(worker.learner))  # ty: ignore[invalid-argument-type]
    learner.start(10)
    for name in ("whole", "broken"):
        if name == "broken":
            layer = worker.policy.trained.module.model.model.language_model.layers[1].mlp
            layer.register_forward_hook(inference_only)
            worker.policy.loaded(0)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            stats = [learner.update(batch) for _ in range(2)]
        counts = [one.get("grad/zero_parameters") for one in stats]
        losses = [one["loss/nll"] for one in stats]
        out[name] = {"counts": counts, "losses": losses, "said": said.getvalue()}
    return out
