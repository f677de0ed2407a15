"""The group of workers: a Ray placement group with a bundle per rank, ranks in a fixed order, calls on all of them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.algorithm.batching import TrainItem
from trainer.algorithm.records import Prompt, Sample
from trainer.algorithm.scheduling import Plan, schedule
from trainer.checkpoint.reader import Found
from trainer.config import ConfigError, RunConfig
from trainer.errors import RayError
from trainer.ranks.environment import environment
from trainer.ranks.gpu_worker import Worker
from trainer.sampling.dealing import deal

FIELDS = {"old": "old_logprobs", "reference": "ref_logprobs"}
"""Where an item keeps what `Worker.logprobs` finds."""

COUNTS = ("optim/skipped_updates", "perf/passes", "perf/gathered_gib")
"""Metrics of an update that all ranks agree on and that add up over a step's updates."""
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
        self.skipped_in_a_row = self.skipped = 0  # updates
        self._places: list[tuple[Any, ...]] = places

    def start(self, total_updates: int, found: Found | None = None) -> dict[str, Any]:
        """Loads model and engine on every rank; returns the first rank's description.

        found: the checkpoint that is going to replace the weights; its files are fetched meanwhile.
        """
        hosts = [p[0] for p in self._places]
        local = [hosts[:i].count(host) for i, host in enumerate(hosts)]
        master, port = hosts[0], self._places[0][2]
        starts = [(i, local[i], master, port, total_updates, found) for i in range(self.world_size)]
        self.facts: dict[str, Any] = self.each("start", starts)[0]
        return self.facts

    def named(self, text: str) -> str:
        """The rank that Ray's message on a dead worker is about, by its process and address; "" where it names none."""
        pid = re.search(r"\bpid[:=]\s*(\d+)", text)
        for rank, (address, _, _, mine) in enumerate(self._places):
            if pid and mine == int(pid[1]) and address in text:
                return f"rank {rank} (process {mine} on {address})"
        return ""

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
        self,
        prompts: Sequence[Prompt],
        lengths: np.ndarray,
        samples_per_prompt: int,
        temperature: float,
        path: str = "",
        split: str = "",
        upcoming: Sequence[Prompt] = (),
    ) -> list[Sample]:
        """Deals prompts to the engines by expected length, and returns the samples by group and index.

        lengths: prompt tokens by row, [rows]. upcoming: the next call's prompts (of the training split), whose images
        the workers decode while their engines sample.
        """
        # The length of unsampled completions is taken as half of the longest; it weighs prompts against completions.
        unknown = samples_per_prompt * self.config.rollout.max_tokens / 2

        def shares(dealt: Sequence[Prompt]) -> list[list[Prompt]]:
            return deal(dealt, [float(lengths[p.row]) + unknown for p in dealt], self.world_size // self.tp)

        now, later = shares(prompts), [[p.row for p in share] for share in shares(upcoming)]
        calls = [
            (now[engine], samples_per_prompt, temperature, path, split, later[engine])
            for engine in (rank // self.tp for rank in range(self.world_size))
        ]
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

    def with_logprobs(
        self, items: Sequence[TrainItem], *, old: bool, reference: bool, path: str = "", split: str = ""
    ) -> list[TrainItem]:
        """The items with log-probabilities of the policy as it stands and of the reference, in large passes.

        path, split: where the items' rows are, if not in the training split.
        """
        if not (old or reference):
            return list(items)
        plan = self._schedule(items, self.facts["logprob_tokens"])
        passes = [[[items[i] for i in p] for p in rank] for rank in plan]
        parts = self.each("logprobs", [(mine, old, reference, path, split) for mine in passes])
        fields: dict[int, dict[str, list[float]]] = {i: {} for i in range(len(items))}
        for rank, found in zip(plan, parts, strict=True):
            for name, passes in found.items():
                for members, flat in zip(rank, passes, strict=True):
                    values = iter(flat)
                    for i in members:
                        fields[i][FIELDS[name]] = list(islice(values, items[i].targets))
        return [replace(item, **fields[i]) for i, item in enumerate(items)]

    def update(self, items: Sequence[TrainItem], kl_coef: float = 0.0) -> dict[str, float]:
        """One optimizer step over all items, by all ranks. Raises ConfigError when too many in a row are skipped.

        kl_coef: weight of the KL in the loss.
        """
        tokens = sum(i.targets for i in items)
        plan = self._schedule(items, self.facts["micro_batch_tokens"])
        calls = [([[items[i] for i in members] for members in rank], tokens, len(items), kl_coef) for rank in plan]
        stats = over_ranks(self.each("update", calls))
        bad = int(stats["optim/skipped_updates"])
        self.skipped, self.skipped_in_a_row = self.skipped + bad, (self.skipped_in_a_row + 1) * bad
        if self.skipped_in_a_row > self.config.optimizer.max_skipped_updates:
            raise ConfigError(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row: start a new run with a "
                "lower optimizer.learning_rate, or look at kl/mean and ratio/clamped_fraction of the steps before; the "
                "last checkpoint stands"
            )
        return stats

    def _schedule(self, items: Sequence[TrainItem], budget: int) -> Plan:
        image = self.facts["image_token_id"]
        return schedule([i.scheduled(image) for i in items], self.world_size, budget, self.facts["cost"])

    def stop(self) -> None:
        """Ends the workers and releases their placement group."""
        for a in self.actors:
            ray.kill(a)
        remove_placement_group(self.group)


def over_ranks(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Joins the ranks' statistics of one update: largest by max, what all agree on from the first, the rest adds up.

    The two moments of the engine's ratios become their effective sample size.
    """
    agreed = ("grad/norm", "optim/lr", *COUNTS)
    out = {
        name: max(values) if _is_largest(name) else values[0] if name in agreed else sum(values)
        for name in stats[0]
        if (values := [s[name] for s in stats])
    }
    if square := out.pop("ratio_square", 0.0):
        out["mismatch/ess"] = out["mismatch/ratio_mean"] ** 2 / square
    return out


def over_updates(stats: Sequence[dict[str, float]], tokens: Sequence[int]) -> dict[str, float]:
    """Joins the statistics of a step's updates: largest by max, counts add up, the rest are means over their tokens.

    What a skipped update lacks (its gradient norm), or what of it is not finite, is the mean of the others.
    """
    stats = [_finite(s) if s.get("optim/skipped_updates") else s for s in stats]
    out = {}
    for name in dict.fromkeys(name for s in stats for name in s):
        values, weights = zip(*((s[name], n) for s, n in zip(stats, tokens, strict=True) if name in s), strict=True)
        if _is_largest(name):
            out[name] = max(values)
        elif name in COUNTS:
            out[name] = sum(values)
        else:
            out[name] = sum(v * n for v, n in zip(values, weights, strict=True)) / (sum(weights) or 1)
    return out


def _finite(stats: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if math.isfinite(value)}


def _is_largest(name: str) -> bool:
    return name.endswith("_max") or name == "perf/peak_memory_gib"


def _await_placement(group: Any, bundle: dict[str, float], count: int, timeout_s: float) -> None:
    ready, started = group.ready(), time.monotonic()
    while not ray.wait([ready], timeout=min(30.0, timeout_s))[0]:
        have = ray.cluster_resources()
        waited = time.monotonic() - started
        short = {
            k: f"{int(have.get(k, 0))} of {int(v * count)}" for k, v in bundle.items() if have.get(k, 0) < v * count
        }
        if short and waited > min(60.0, timeout_s):
            raise ConfigError(
                f"the Ray cluster cannot hold {count} workers (has {short}): "
                "lower placement.nodes or placement.workers_per_node, or wait for the missing node"
            )
        if waited > timeout_s:
            raise RayError(f"Ray placed no group of {count} workers within {timeout_s:.0f} s")
        print(f"waiting for {count} workers to be placed; cluster has {have}", flush=True)
