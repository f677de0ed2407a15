"""The part of a worker that computes: its mirror of the weights, and its engine."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainer.algorithm.traces import Trace
from trainer.config import ConfigError, RunConfig, Split
from trainer.fleet.anchors import fill, pretrained
from trainer.fleet.following import Seen
from trainer.fleet.mirror import Layout, Mirror
from trainer.fleet.objects import Anchor, Objects
from trainer.fleet.units import RolloutUnit
from trainer.ranks.process import RankProcess


class EngineWorker:
    """One process with one engine. Its process is made as a rank's is, so that both compute the same."""

    def __init__(self, config: RunConfig, objects: Objects, about: dict[str, Any]) -> None:
        """about: what the head says of the run. Raises ConfigError where data or model are others."""
        self.config = config
        self.process = RankProcess(config)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.process.meet(0, 0, "127.0.0.1", port)
        self.reader = self.process.reader
        self._splits: dict[Literal["train", "evaluation"], Split] = {
            "train": config.train_split,
            "evaluation": config.evaluation_split,
        }
        fingerprint = self.reader.datasets[config.train_split].fingerprint
        if fingerprint != about["data"]:
            raise ConfigError(
                f"data.path {config.data.path} holds other rows than the trainer's ({fingerprint[:12]}, not"
                f" {about['data'][:12]}): give this worker the dataset that the run trains on"
            )

        # Here, so that the environment is set before anything of vLLM is loaded.
        from trainer.sampling.vllm_engine import Engine

        dist.init_process_group("nccl" if self.process.device.type == "cuda" else "gloo")
        model = pretrained(config)
        self.mirror = Mirror(
            objects,
            about["layout"],
            model.tensors,
            self._fill,
            config.rollout.sync_bucket_bytes,
            weights=model.merged,
        )
        self.engine = Engine(config, self.reader.prompter, self.reader.images_per_prompt())
        self._pushed = ""

    def _fill(self, tensors: dict[str, torch.Tensor], anchor: Anchor) -> None:
        fill(tensors, self.config, anchor)

    def follow(self, objects: Objects, layout: Layout) -> None:
        """Goes on with a new attempt."""
        self.mirror.follow(objects, layout)

    def take_weights(self, seen: Seen) -> None:
        """Fetches the newest weights into the mirror. Raises as `Mirror.to`."""
        self.mirror.to(seen.version, seen.lineage, seen.anchors)

    @property
    def device(self) -> str:
        """The GPU's name, or cpu."""
        return self.process.device_name or "cpu"

    def sample(self, unit: RolloutUnit, seen: Seen) -> tuple[list[Trace], float]:
        """A unit's traces with the weights that it asks for, and the seconds that sampling took."""
        from trainer.weights import in_process

        self.mirror.to(unit.version, unit.lineage, seen.anchors)
        if self._pushed != unit.lineage:
            self._pushed = ""
            in_process.push(self.mirror, self.engine)
            self._pushed = unit.lineage
        else:
            # Other units' prefixes were computed in other batches: a unit is a function of itself alone.
            self.engine.reset_caches()
        began = time.monotonic()
        split = self._splits[unit.split]
        groups = self.engine.generate(
            unit.prompts,
            lambda prompt: self.reader.request(split, prompt.row),
            samples_per_prompt=unit.samples_per_prompt,
            temperature=unit.temperature,
            top_p=unit.top_p,
            max_tokens=unit.max_tokens,
        )
        traces = [trace for group in groups for trace in group]
        traces.sort(key=lambda trace: (trace.group, trace.index))
        return traces, time.monotonic() - began


def facts(device: str) -> dict[str, Any]:
    """What a worker's marks say of its machine."""
    return {"host": socket.gethostname(), "process": os.getpid(), "device": device}
