"""The learner over all ranks: deals traces to them, calls them together, joins what they return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainer.algorithm.batching import TrainBatch, trace_length
from trainer.algorithm.scheduling import Plan, busy_fraction, schedule_passes
from trainer.algorithm.traces import Trace
from trainer.checkpoint.shard_reader import FoundCheckpoint
from trainer.checkpoint.writer import RankStatus
from trainer.config import ConfigError, RunConfig, Split
from trainer.learning.learner_part import LearnerFacts, LearnerPart
from trainer.ranks.ray_ranks import RayRanks

NAMED = 3
"""Parameters that are named of those without a gradient."""
COUNTS = ("optim/skipped_updates", "optim/empty_updates", "perf/passes", "perf/gathered_gib")
"""Metrics of an update that all ranks agree on and that add up over a step's updates."""
AGREED = ("grad/norm", "grad/zero_parameters", "optim/lr", *COUNTS)
"""Metrics of an update that all ranks agree on."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the learned tokens of traces, [T] float32 per trace; None where they were not
    asked for."""

    old: list[np.ndarray] | None = None
    """Under the policy as it stands."""
    reference: list[np.ndarray] | None = None
    """Under the frozen reference."""


@dataclass(frozen=True)
class RankWeights:
    """The policy's weights, which lie in shards in the processes of the ranks."""

    version: int
    ranks: RayRanks

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Brings every group to the driver, on the host. Samplers that share the ranks' processes need no
        such copy."""
        return self.ranks.stream(LearnerPart.weight_groups, [()] * self.ranks.world_size)


class DistributedLearner:
    """The policy, sharded over ranks, and what trains it: what a loop asks to score traces and to learn from
    them. Every method returns when it is done on all ranks."""

    facts: LearnerFacts

    def __init__(self, config: RunConfig, ranks: RayRanks) -> None:
        self.config = config
        self.ranks = ranks
        self.skipped = 0
        """Updates of the run that were skipped because their gradient was not finite."""
        self._skipped_in_a_row = 0

    def start(self, total_updates: int, source: FoundCheckpoint | None = None) -> None:
        """Loads policy and reference on every rank. Arguments as in `LearnerPart.start`."""
        self.facts = self.ranks.all(LearnerPart.start, total_updates, source)[0]

    # --- scoring and learning

    def logprobs(self, traces: Sequence[Trace], split: Split, *, old: bool, reference: bool) -> Logprobs:
        """Scores traces whose rows stand in `split`, in passes larger than those of training."""
        if not (old or reference):
            return Logprobs()
        plan = self._schedule(traces, self.facts.logprob_tokens, self.facts.logprob_keys)[0]
        calls = [(_picked(traces, passes), split, old, reference) for passes in plan]
        results = self.ranks.each(LearnerPart.logprobs, calls)

        scored: dict[str, list[np.ndarray]] = {}
        for passes, result in zip(plan, results, strict=True):
            for name, flat_passes in result.items():
                by_trace = scored.setdefault(name, [np.zeros(0, np.float32)] * len(traces))
                for members, flat in zip(passes, flat_passes, strict=True):
                    _spread(by_trace, traces, members, flat)
        return Logprobs(scored.get("old"), scored.get("reference"))

    def update(self, batch: TrainBatch, kl_coef: float = 0.0) -> dict[str, float]:
        """Makes one optimizer step over the whole batch; returns its metrics. kl_coef: weight of the KL to
        the reference in the loss. Raises ConfigError when too many updates in a row had a gradient that was
        not finite."""
        if not len(batch):
            self.ranks.all(LearnerPart.pass_over)
            self.skipped += 1  # Adam has not counted it either
            return {"optim/empty_updates": 1.0}
        plan, busy = self._schedule(batch.traces, self.facts.micro_batch_tokens, self.facts.update_keys)
        calls = []
        for passes in plan:
            batches = [batch.pick(members) for members in passes]
            calls.append((batches, batch.tokens, len(batch), kl_coef))
        stats = join_rank_stats(self.ranks.each(LearnerPart.update, calls))
        stats["perf/ranks_busy_fraction"] = busy

        if "grad/zero_parameters" in stats:
            self._name_without_gradient()
        if not stats["optim/skipped_updates"]:
            self._skipped_in_a_row = 0
            return stats
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.config.optimizer.max_skipped_updates:
            raise ConfigError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row: start a new run"
                " with a lower optimizer.learning_rate, or look at kl/mean and ratio/clamped_fraction of the"
                " steps before"
            )
        return stats

    def _name_without_gradient(self) -> None:
        """Warns of the parameters that got no gradient in the first update."""
        names = self.ranks.first(LearnerPart.without_gradient)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        print(
            f"warning: the gradient of {', '.join(names[:NAMED])}{more} was exactly 0 in the first update: "
            "what should learn there does not. Stop this run, unless the loss does not use that part",
            flush=True,
        )

    def _schedule(self, traces: Sequence[Trace], budget: int, keys: float) -> tuple[Plan, float]:
        """The passes, and the share of their time in which ranks do not wait for the slowest one."""
        lengths = [trace_length(trace, self.facts.image_token_id) for trace in traces]
        plan = schedule_passes(lengths, self.ranks.world_size, budget, self.facts.cost, keys)
        return plan, busy_fraction(plan, lengths, self.facts.cost)

    # --- weights and checkpoints

    def weights(self, version: int) -> RankWeights:
        """The policy's weights as they stand, under this version number."""
        return RankWeights(version, self.ranks)

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        """Starts to write the checkpoint of `step`; returns the seconds that training stood still for it.
        keep: steps whose local files stay. send: upload it as soon as it is written. attempt: into whose
        folder."""
        return max(self.ranks.all(LearnerPart.save, step, keep, send, attempt))

    def send(self, step: int) -> None:
        """Starts to upload what was written of `step`."""
        self.ranks.all(LearnerPart.send, step)

    def save_status(self) -> list[RankStatus]:
        """What every rank has written and uploaded. Raises CheckpointError if one could not write."""
        return self.ranks.all(LearnerPart.save_status)

    def load(self, source: FoundCheckpoint) -> None:
        """Takes over a committed checkpoint. Raises CorruptCheckpoint, before any rank resumes from it."""
        # All ranks load before any resumes: one may find its files damaged.
        self.ranks.all(LearnerPart.load, source)
        self.skipped = source.state.get("skipped", 0)
        self.ranks.all(LearnerPart.resume, source.state["updates"], self.skipped)


def _picked(traces: Sequence[Trace], passes: Sequence[Sequence[int]]) -> list[list[Trace]]:
    """The traces of each pass. passes: indices into `traces`."""
    return [[traces[index] for index in members] for members in passes]


def _spread(
    by_trace: list[np.ndarray], traces: Sequence[Trace], members: Sequence[int], flat: np.ndarray
) -> None:
    """Cuts a pass's values, flat [N] over the learned tokens of its traces, into `by_trace`. members: indices
    of the pass's traces."""
    start = 0
    for index in members:
        stop = start + len(traces[index].learned)
        by_trace[index] = flat[start:stop]
        start = stop


def join_rank_stats(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Joins the ranks' metrics of one update. Maxima stay maxima; what all ranks agree on is taken from the
    first rank; all other metrics add up. With the mean of the ratios between policy and engine, their mean
    square becomes an effective sample size."""
    out = {}
    for name in stats[0]:
        values = [of_rank[name] for of_rank in stats]
        if _is_largest(name):
            out[name] = max(values)
        elif name in AGREED:
            out[name] = values[0]
        else:
            out[name] = sum(values)
    square = out.pop("ratio_square", 0.0)
    if square:
        out["mismatch/ess"] = out["mismatch/ratio_mean"] ** 2 / square
    return out


def join_update_stats(stats: Sequence[dict[str, float]], tokens: Sequence[int]) -> dict[str, float]:
    """Joins the metrics of a step's updates. Maxima stay maxima and counts add up; all other metrics become
    means, weighted by each update's tokens. A skipped update has no gradient norm and may have values that
    are not finite. Such values are left out of the means."""
    values: dict[str, list[float]] = {}
    weights: dict[str, list[int]] = {}
    for update, count in zip(stats, tokens, strict=True):
        skipped = bool(update.get("optim/skipped_updates"))
        for name, value in update.items():
            if not skipped or math.isfinite(value):
                values.setdefault(name, []).append(value)
                weights.setdefault(name, []).append(count)

    out = {}
    for name, column in values.items():
        if _is_largest(name):
            out[name] = max(column)
        elif name in COUNTS:
            out[name] = sum(column)
        else:
            out[name] = _weighted_mean(column, weights[name])
    return out


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """0 if all weights are 0."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / (sum(weights) or 1)


def _is_largest(name: str) -> bool:
    return name.endswith("_max") or name == "perf/peak_memory_gib"
