"""The group of workers: a Ray placement group with a bundle per rank, ranks in a fixed order, calls on all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.algorithm.batching import TrainItem, schedule
from trainer.algorithm.records import Prompt, Sample
from trainer.config import ConfigError, RunConfig
from trainer.engine.gpu_worker import Worker, environment

ROWS_PER_CALL = 1024
PROGRESS_S = 10.0


class Workers:
    """All ranks. Methods return when every rank has; an exception on one rank is raised here."""

    def __init__(self, config: RunConfig) -> None:
        """Places the workers; they load nothing yet. Raises ConfigError if the cluster lacks the GPUs or CPUs."""
        self.config = config
        self.world_size, self.tp = config.placement.world_size, config.rollout.tensor_parallel
        gpu = config.placement.device == "cuda"
        bundle = {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": float(config.placement.threads_per_worker)}
        self.group = placement_group([bundle] * self.world_size, strategy="PACK")
        _await_placement(self.group, bundle, self.world_size, config.placement.start_timeout_s)
        actor = ray.remote(Worker)
        actors: list[Any] = [
            actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                runtime_env={"env_vars": environment(config)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i),
            ).remote(config)
            for i in range(self.world_size)
        ]
        # PACK does not order bundles: an engine's tensor-parallel ranks must be neighbours on one node.
        places = ray.get([a.where.remote() for a in actors])
        ranked = sorted(zip(places, actors, strict=True), key=lambda pair: pair[0][:2])
        self.actors: list[Any] = [a for _, a in ranked]
        places = [p for p, _ in ranked]
        self.pids = [p[3] for p in places]
        self._places: list[tuple[Any, ...]] = places

    def start(self, total_updates: int) -> dict[str, Any]:
        """Loads model and engine on every rank; returns what the first says of them."""
        hosts = [p[0] for p in self._places]
        local = [hosts[:i].count(host) for i, host in enumerate(hosts)]
        master, port = hosts[0], self._places[0][2]
        return self.each("start", [(i, local[i], master, port, total_updates) for i in range(self.world_size)])[0]

    def all(self, method: str, *args: Any) -> list[Any]:
        """Calls `method(*args)` on every rank; results by rank."""
        return ray.get([getattr(a, method).remote(*args) for a in self.actors])

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `method(*arguments[rank])` on every rank; results by rank."""
        return ray.get([getattr(a, method).remote(*args) for a, args in zip(self.actors, arguments, strict=True)])

    def fingerprint(self) -> str:
        """Of the model's processor."""
        return ray.get(self.actors[0].fingerprint.remote())

    def generate(
        self, prompts: list[Prompt], samples_per_prompt: int, temperature: float, path: str = "", split: str = ""
    ) -> list[Sample]:
        """Deals prompts to the engines, and returns the samples by group and index."""
        engines = self.world_size // self.tp
        shares = [prompts[e::engines] for e in range(engines)]
        calls = [(shares[r // self.tp], samples_per_prompt, temperature, path, split) for r in range(self.world_size)]
        samples = [s for part in self.each("generate", calls) for s in part]
        return sorted(samples, key=lambda s: (s.group, s.index))

    def lengths(self, path: str, split: str, rows: int) -> np.ndarray:
        """`trainer.data.lengths.measure` of the first `rows` rows of a split, [rows, 2], by all ranks side by side.

        Each rank takes a contiguous slice, so that it reads a row group once, in pieces, so that progress can be shown.
        """
        out, pieces = np.zeros((rows, 2), np.int32), {}
        for rank, actor in enumerate(self.actors):
            first, last = rows * rank // self.world_size, rows * (rank + 1) // self.world_size
            for start in range(first, last, ROWS_PER_CALL):
                stop = min(start + ROWS_PER_CALL, last)
                pieces[actor.lengths.remote(path, split, start, stop)] = start, stop
        waiting, done, shown = list(pieces), 0, time.monotonic()
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=PROGRESS_S)
            for piece in ready:
                start, stop = pieces[piece]
                out[start:stop] = ray.get(piece)
                done += stop - start
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                print(f"data: {done} of {rows} rows of {split} measured", flush=True)
        return out

    def logprobs(self, items: Sequence[TrainItem], micro_batch: int) -> list[list[float]]:
        """The policy's log-probabilities of every item's answer, in the order of `items`."""
        plan = schedule([i.length for i in items], self.world_size, micro_batch)
        parts = self.each("logprobs", [([[items[i] for i in micro] for micro in rank],) for rank in plan])
        out: list[list[float]] = [[] for _ in items]
        for rank, micros in zip(plan, parts, strict=True):
            for micro, flat in zip(rank, micros, strict=True):
                at = 0
                for i in micro:
                    out[i] = flat[at : at + len(items[i].token_ids)]
                    at += len(items[i].token_ids)
        return out

    def update(self, items: Sequence[TrainItem], old_logprobs: Sequence[list[float]] | None = None) -> dict[str, float]:
        """One optimizer step over all items, by all ranks."""
        tokens = sum(len(i.token_ids) for i in items)
        plan = schedule([i.length for i in items], self.world_size, self.config.algorithm.micro_batch)
        calls = []
        for rank in plan:
            old = None
            if old_logprobs is not None:
                old = [[x for i in micro for x in old_logprobs[i]] for micro in rank]
            calls.append(([[items[i] for i in micro] for micro in rank], tokens, len(items), old))
        return merge(self.each("update", calls))

    def stop(self) -> None:
        """Ends the workers and gives their places back."""
        for a in self.actors:
            ray.kill(a)
        remove_placement_group(self.group)


def merge(stats: list[dict[str, float]]) -> dict[str, float]:
    """Joins the ranks' statistics: maxima and peaks by max, what all agree on from the first, the rest adds up."""
    out = {}
    for name in stats[0]:
        values = [s[name] for s in stats]
        if name.endswith("_max") or name.startswith(("perf/", "time/")):
            out[name] = max(values)
        elif name in ("grad/norm", "optim/lr"):
            out[name] = values[0]
        else:
            out[name] = sum(values)
    return out


def _await_placement(group: Any, bundle: dict[str, float], count: int, timeout_s: float) -> None:
    ready, started = group.ready(), time.monotonic()
    while not ray.wait([ready], timeout=min(30.0, timeout_s))[0]:
        have = ray.cluster_resources()
        waited = time.monotonic() - started
        short = {
            k: f"{int(have.get(k, 0))} of {int(v * count)}" for k, v in bundle.items() if have.get(k, 0) < v * count
        }
        if short and waited > min(60.0, timeout_s) or waited > timeout_s:
            raise ConfigError(
                f"the Ray cluster cannot hold {count} workers (has {short or have}): "
                "lower placement.nodes or placement.workers_per_node, or wait for the missing node"
            )
        print(f"waiting for {count} workers to be placed; cluster has {have}", flush=True)
