"""The part of a worker that computes: its mirror of the weights, and its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from torch import Tensor

from trainer.algorithm.traces import Trace
from trainer.config import ConfigError, RunConfig
from trainer.fleet.engine_ranks import EnginePart, OtherRanks
from trainer.fleet.fleet_records import AboutRun, Layout
from trainer.fleet.objects import Objects
from trainer.fleet.rollout_units import RolloutUnit
from trainer.fleet.run_follower import SeenRun
from trainer.fleet.starting_weights import fill_from_anchor, load_pretrained
from trainer.fleet.weight_mirror import WeightMirror


class EngineWorker:
    """Rank 0 of the engine, which has the only copy of the weights on the host, and the other ranks.

    Whatever may fail, rank 0 does first and alone: the others only ever take part in what no store and no
    bucket can hold up.
    """

    def __init__(
        self,
        config: RunConfig,
        objects: Objects,
        about: AboutRun,
        lost: Callable[[str, int], None],
        known: Callable[[str], None] = lambda device: None,
    ) -> None:
        """about: what the head says of the run. lost: see `OtherRanks`. known: called with the device before
        the model is read. Raises ConfigError where data or model are others."""
        self.part = EnginePart(config, 0)
        fingerprint = self.part.reader.datasets[config.train_split].fingerprint
        if fingerprint != about.data:
            raise ConfigError(
                f"data.path {config.data.path} holds other rows than the trainer's ({fingerprint[:12]}, not"
                f" {about.data[:12]}): give this worker the dataset that the run trains on"
            )
        known(self.device)
        self.others = OtherRanks(config, lost)
        self.model = load_pretrained(config)
        check_layout(about.layout, self.model.tensors, config.model.path)
        self.mirror = WeightMirror(
            objects,
            about.layout,
            self.model.tensors,
            partial(fill_from_anchor, self.model, config),
            config.rollout.sync_bucket_bytes,
            weights=self.model.merged,
            as_loaded=True,
        )
        self.others.tell(do="build")
        self.part.build()
        self._pushed = ""
        self.out_of_step = False
        """Whether the ranks may be at different calls, as after an error within one: then none can go on."""

    def follow(self, layout: Layout) -> None:
        """Goes on with a new attempt."""
        self.mirror.follow(layout)

    def take_weights(self, seen: SeenRun) -> None:
        """Fetches the newest weights into the mirror. Raises as `Mirror.to`."""
        self.mirror.to(seen.version, seen.lineage, seen.anchors)

    @property
    def device(self) -> str:
        """The GPU's name, with their number where the engine has several; or cpu."""
        name = self.part.process.device_name or "cpu"
        return name if self.part.ranks == 1 else f"{self.part.ranks}x {name}"

    def sample(self, unit: RolloutUnit, seen: SeenRun) -> tuple[list[Trace], float]:
        """A unit's traces with the weights that it asks for, and the seconds that sampling took."""
        self.mirror.to(unit.version, unit.lineage, seen.anchors)
        self.out_of_step = self.part.ranks > 1
        if self._pushed != unit.lineage:
            self._pushed = ""
            self.others.tell(do="load", version=self.mirror.version)
            self.part.load(self.mirror.version, self.mirror)
            self._pushed = unit.lineage
        else:
            self.others.tell(do="forget")
            self.part.forget_prefixes()
        began = time.monotonic()
        self.others.tell(do="sample", unit=msgspec.to_builtins(unit))
        traces = self.part.sample(unit)
        self.out_of_step = False
        traces.sort(key=lambda trace: (trace.group, trace.index))
        return traces, time.monotonic() - began


def check_layout(layout: Layout, tensors: Mapping[str, Tensor], path: str) -> None:
    """Raises ConfigError where the tensors are not those that the trainer's ranks hold."""
    for shard in layout:
        for name, _, stop in shard:
            if name not in tensors or stop > tensors[name].numel():
                raise ConfigError(
                    f"model.path {path} is another model than the trainer's: it has no {name} of that size"
                )
