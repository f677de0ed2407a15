"""The ranks as Ray actors: a placement group with a bundle per rank, and ranks in a fixed order."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trainer.config import ConfigError, RunConfig
from trainer.ranks.environment import rank_environment
from trainer.ranks.process import RankPlace, RankProcess
from trainer.system import last_words
from trainer.system.errors import RayError

P = ParamSpec("P")
R = TypeVar("R")

READ_S = 30.0
"""Longest wait for the log of a rank that died: Ray starts a process on its node."""


class RayRanks:
    """All ranks of a run, one actor each. A method is named by its function, such as `LearnerPart.update`; it
    is called on every rank, and the call returns when every rank has returned.

    Most methods are collective: inside them the ranks wait for each other, so they are never called on a few
    ranks. An exception on one rank is raised here.
    """

    world_size: int

    def __init__(self, config: RunConfig) -> None:
        """Places the actors; they load nothing yet. Raises ConfigError if the cluster lacks the GPUs or
        CPUs."""
        self.config = config
        self.world_size = config.placement.world_size
        self._last_call = ""
        if config.placement.device == "cuda":
            bundle = {"CPU": 1.0, "GPU": 1.0}
        else:
            bundle = {"CPU": float(config.placement.threads_per_worker)}
        self.group = placement_group([bundle] * self.world_size, strategy="PACK")
        _await_placement(self.group, bundle, self.world_size, config.placement.start_timeout_s)

        actor = ray.remote(RankProcess)
        actors: list[Any] = []
        for number in range(self.world_size):
            options = actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                runtime_env={"env_vars": rank_environment(config)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=number
                ),
            )
            actors.append(options.remote(config))

        # PACK does not order bundles: an engine's tensor-parallel ranks must be neighbors on one node.
        places: list[RankPlace] = ray.get([actor.where.remote() for actor in actors])
        ordered = sorted(zip(places, actors, strict=True), key=lambda pair: pair[0])
        self._places = [place for place, _ in ordered]
        self.actors = [actor for _, actor in ordered]
        self.pids = [place.pid for place in self._places]

    def start(self) -> None:
        """Tells every rank its number and where rank 0 is (`RankProcess.set_rank`)."""
        first = self._places[0]
        on_host: Counter[str] = Counter()
        meetings = []
        for rank, place in enumerate(self._places):
            on_gpu = self.config.placement.device == "cuda"
            local = place.position if on_gpu else on_host[place.address]
            on_host[place.address] += 1
            meetings.append((rank, local, first.address, first.port))
        self.each(RankProcess.set_rank, meetings)

    def all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls `method(*args)` on every rank; returns the results by rank."""
        assert not kwargs, "arguments travel to the ranks by position"
        return self.each(method, [args] * self.world_size)

    def each(self, method: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
        """Calls `method(*arguments[rank])` on every rank; returns the results by rank."""
        self._last_call = getattr(method, "__qualname__", repr(method))
        calls = zip(self.actors, arguments, strict=True)
        return ray.get([actor.call.remote(method, *args) for actor, args in calls])

    def first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method that is not collective on rank 0 alone."""
        self._last_call = getattr(method, "__qualname__", repr(method))
        return ray.get(self.actors[0].call.remote(method, *args))

    def stream(self, method: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]]) -> Iterator[R]:
        """Starts a generator method on every rank at once. The iterator yields results in the order in
        which the ranks yield them."""
        self._last_call = getattr(method, "__qualname__", repr(method))
        calls = zip(self.actors, arguments, strict=True)
        streams = [
            actor.stream.options(num_returns="streaming").remote(method, *args) for actor, args in calls
        ]
        return self._results(streams)

    @staticmethod
    def _results(waiting: list[Any]) -> Iterator[Any]:
        """Yields what any of the generators yields, in the order in which it comes."""
        while waiting:
            ready: Any = ray.wait(waiting, num_returns=1)[0][0]
            try:
                result = next(ready)
            except StopIteration:
                waiting.remove(ready)
            else:
                yield ray.get(result)

    def stop(self) -> None:
        """Ends the ranks."""
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)

    def named(self, message: str) -> str:
        """The rank that Ray's message about a dead actor refers to, found by process id and address."""
        rank = self._meant(message)
        if rank is None:
            return ""
        place = self._places[rank]
        return f"rank {rank} (process {place.pid} on {place.address})"

    def _meant(self, message: str) -> int | None:
        pid = re.search(r"\bpid[:=]\s*(\d+)", message)
        for rank, place in enumerate(self._places):
            if pid and place.pid == int(pid[1]) and place.address in message:
                return rank
        return None

    def cause(self, message: str) -> str:
        """Why the rank died that Ray's message refers to, from its log, which the run's folder then has. Ray
        itself names every cause that there may be."""
        rank = self._meant(message)
        if rank is None:
            return ""
        place = self._places[rank]
        there = NodeAffinitySchedulingStrategy(place.node, soft=False)
        read: Any = ray.remote(last_words.describe_death).options(num_cpus=0, scheduling_strategy=there)
        try:
            why, log = ray.get(read.remote(place.log, place.memory_kills), timeout=READ_S)
        except (ray.exceptions.RayError, TimeoutError):
            return f"its machine does not answer; it was asked for {self._last_call}"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        out = Path(self.config.run.dir) / f"death-rank-{rank}-{stamp}.txt"
        out.write_text(log)
        return f"{why}; it was asked for {self._last_call} (its log: {out})"


def _await_placement(group: Any, bundle: dict[str, float], count: int, timeout_s: float) -> None:
    """Waits until Ray has placed the group. Raises ConfigError where the cluster is too small, RayError when
    late."""
    ready, started = group.ready(), time.monotonic()
    while not ray.wait([ready], timeout=min(30.0, timeout_s))[0]:
        have, waited = ray.cluster_resources(), time.monotonic() - started
        short = {}
        for name, amount in bundle.items():
            if have.get(name, 0) < amount * count:
                short[name] = f"{int(have.get(name, 0))} of {int(amount * count)}"
        if short and waited > min(60.0, timeout_s):
            raise ConfigError(
                f"the Ray cluster cannot hold {count} ranks (has {short}): "
                "lower placement.nodes or placement.workers_per_node, or wait for the missing node"
            )
        if waited > timeout_s:
            raise RayError(f"Ray placed no group of {count} ranks within {timeout_s:.0f} s")
        print(f"waiting for {count} ranks to be placed; cluster has {have}", flush=True)
