"""The group of workers: a Ray placement group with a bundle per rank, ranks in a fixed order, calls on all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.algorithm.batching import TrainItem, schedule
from trainer.algorithm.records import Prompt, Sample
from trainer.config import ConfigError, RunConfig
from trainer.engine.gpu_worker import Worker, environment


class Workers:
    """All ranks. Methods return when every rank has; an exception on one rank is raised here."""

    def __init__(self, config: RunConfig, total_updates: int) -> None:
        """Places and starts the workers. Raises ConfigError if the cluster lacks the GPUs or CPUs for them."""
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
        local = [[q[0] for q in places[:i]].count(p[0]) for i, p in enumerate(places)]
        master, port = places[0][0], places[0][2]
        starts = [a.start.remote(i, local[i], master, port, total_updates) for i, a in enumerate(self.actors)]
        self.facts: list[dict[str, Any]] = ray.get(starts)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Calls `method(*args)` on every rank; results by rank."""
        return ray.get([getattr(a, method).remote(*args) for a in self.actors])

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls `method(*arguments[rank])` on every rank; results by rank."""
        return ray.get([getattr(a, method).remote(*args) for a, args in zip(self.actors, arguments, strict=True)])

    def generate(
        self, prompts: list[Prompt], samples_per_prompt: int, temperature: float, path: str = "", split: str = ""
    ) -> list[Sample]:
        """Deals prompts to the engines, and returns the samples by group and index."""
        engines = self.world_size // self.tp
        shares = [prompts[e::engines] for e in range(engines)]
        calls = [(shares[r // self.tp], samples_per_prompt, temperature, path, split) for r in range(self.world_size)]
        samples = [s for part in self.each("generate", calls) for s in part]
        return sorted(samples, key=lambda s: (s.group, s.index))

    def prompt_lengths(self, rows: Sequence[int]) -> list[int]:
        """Prompt tokens of each row, computed side by side."""
        parts = self.each("prompt_lengths", [(rows[r :: self.world_size],) for r in range(self.world_size)])
        lengths = [0] * len(rows)
        for rank, part in enumerate(parts):
            lengths[rank :: self.world_size] = part
        return lengths

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
