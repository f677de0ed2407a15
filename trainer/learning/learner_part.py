"""One rank's share of the learner: its part of the ZeRO-3 policy, of the reference, and of every
checkpoint."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.algorithm.batching import MicroBatch, TrainBatch, collate, pin_record
from trainer.algorithm.losses import token_weights
from trainer.algorithm.scheduling import KEYS, PassCost
from trainer.algorithm.traces import Trace
from trainer.checkpoint.shard_reader import FoundCheckpoint, ShardReader, fetch_rank
from trainer.checkpoint.writer import RankStatus, ShardWriter
from trainer.config import Split, budget, checkpoint_holds_policy
from trainer.data.dialog import Dialogs, dialogs_of
from trainer.hardware import model_shapes
from trainer.learning import lora
from trainer.learning.teacher import FrozenModel, teacher_of
from trainer.observe import beacon
from trainer.ranks.heap import Heap
from trainer.ranks.process import RankProcess

if TYPE_CHECKING:
    from trainer.learning.policy import Policy, TrainMicroBatch

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class LearnerFacts:
    """What the ranks know of model and device once they have loaded."""

    device_name: str
    """The GPU's name; empty on CPU."""
    image_token_id: int
    """The id of an image's placeholder; -1 where the model reads text only."""
    micro_batch_tokens: int
    """Budget of one training pass."""
    logprob_tokens: int
    """Budget of one scoring pass."""
    cost: PassCost
    """What a pass costs, for the schedule."""
    update_keys: float = KEYS
    """Keys per token of a training pass."""
    logprob_keys: float = KEYS
    """Keys per token of a scoring pass."""


class LearnerPart:
    """A part of a `RankProcess`. Methods that compute are collective."""

    policy: Policy
    writer: ShardWriter

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self.config = process.config
        self.reader = process.reader
        self.asleep_bytes = 0
        """What torch counts of an engine that sleeps in this process; the peak of an update leaves it out."""
        self.tool_s = self.tool_wait_s = 0.0
        """Time that slow tools of an engine in this process took since the last update, and it waited."""
        self._heap = Heap()
        self._fetching: Future[None] | None = None

    def start(self, total_updates: int, source: FoundCheckpoint | None = None) -> LearnerFacts:
        """Meets the other ranks and loads policy and reference. total_updates: optimizer steps of the whole
        run, for the learning-rate schedule. source: the checkpoint that `load` is going to read; a thread
        fetches its files meanwhile. What the thread cannot fetch, `load` fetches or reports."""
        rank = self.process.rank
        world_size = self.process.world_size
        if source is not None:
            self._fetching = ThreadPoolExecutor(1, "checkpoint").submit(fetch_rank, source, rank, world_size)
        lora.silence_bitsandbytes()
        # Here, so that the driver, which only names this class, loads no DeepSpeed.
        from trainer.learning.policy import Policy, init_distributed

        init_distributed(self.process.device.type)
        prompter = self.reader.prompter
        banned = prompter.banned_token_ids() if self.config.method == "grpo" else []
        shape = model_shapes.from_config(prompter.hf_config.to_dict())
        budget.check_experts(self.config, shape)
        empty = source is not None and checkpoint_holds_policy(self.config)
        teacher = self._teacher()
        self.policy = Policy(self.config, shape, banned, self.process.device, total_updates, empty, teacher)
        self.writer = ShardWriter(self.config, rank, world_size)
        training = budget.micro_batch_tokens(self.config, shape)
        scoring = budget.logprob_tokens(self.config, shape)
        return LearnerFacts(
            device_name=self.process.device_name,
            image_token_id=self.reader.image_token_id,
            micro_batch_tokens=training,
            logprob_tokens=scoring,
            cost=PassCost(attended=budget.attended_cost(shape), image_token=budget.image_token_cost(shape)),
            update_keys=budget.keys_per_token(self.config, shape, training),
            logprob_keys=budget.keys_per_token(self.config, shape, scoring, gradients=False),
        )

    def _teacher(self) -> FrozenModel | None:
        """The run's teacher, if it has one. Raises ConfigError if it reads other tokens than the policy."""
        if not self.config.teaches:
            return None
        pictures = self.reader.datasets[self.config.train_split].images_per_row > 0
        return teacher_of(self.config, self.reader.prompter, pictures)

    # --- scoring and learning

    def logprobs(
        self, passes: list[list[Trace]], split: Split, old: bool, reference: bool
    ) -> dict[str, list[np.ndarray]]:
        """Log-probabilities of the learned tokens under policy (`old`) and `reference`, flat, [N] float32 per
        pass."""
        with self.process.recording("logprobs"):
            batches = self._ahead(lambda traces: self.collate(traces, split), passes)
            scored = self.policy.logprobs(batches, old, reference)
        return {name: [tensor.numpy() for tensor in tensors] for name, tensors in scored.items()}

    def update(
        self, passes: list[TrainBatch], tokens: int, sequences: int, kl_coef: float
    ) -> dict[str, float]:
        """One optimizer step over this rank's passes. tokens, sequences: counts over all ranks, the global
        denominators. kl_coef: weight of the KL in the loss."""
        with self.process.recording("update"):
            # SFT has no engine, whose sleep would start the measurement of the peak anew.
            if self.config.method == "sft":
                self.forget_peak()
            batches = self._ahead(lambda batch: self.micro_batch(batch, tokens, sequences), passes)
            stats = self.policy.update(batches, len(passes), kl_coef)
            self._heap.trim()
        stats |= {"perf/peak_memory_gib": self._peak_memory_gib()} | self._fragments()
        if self.config.turns.environment != "off":
            stats |= {"perf/tool_s_max": self.tool_s, "perf/tool_wait_s_max": self.tool_wait_s}
            self.tool_s = self.tool_wait_s = 0.0
        return stats

    def _ahead(self, build: Callable[[T], Any], passes: list[T]) -> Iterator[Any]:
        """Builds passes in a thread, for a GPU in memory that is copied from without a wait: images of a
        pass are tens of MiB, which the thread that launches kernels would have to copy first."""
        on_gpu = self.process.device.type == "cuda"
        return build_ahead(lambda batch: pin_record(build(batch)) if on_gpu else build(batch), passes)

    def pass_over(self) -> None:
        """Counts an update that has nothing to learn from, for the learning-rate schedule. Weights and
        moments stay as they are: a step of Adam would move them even by a gradient of 0."""
        self.policy.updates += 1

    def without_gradient(self) -> list[str]:
        """Names of the parameters whose gradient was exactly 0 in the run's first update."""
        return self.policy.without_gradient

    def micro_batch(self, batch: TrainBatch, tokens: int, sequences: int) -> TrainMicroBatch:
        """A pass with what the loss needs. tokens, sequences: as in `update`."""
        from trainer.learning.policy import TrainMicroBatch

        traces = batch.traces
        denominator = self.config.algorithm.loss_denominator
        lengths = torch.tensor([len(trace.learned) for trace in traces], dtype=torch.long)
        metrics_denominator = "sequences" if denominator == "sequences" else "tokens"
        rollout = [trace.logprobs for trace in traces if trace.logprobs is not None]
        all_sampled = len(rollout) == len(traces)
        return TrainMicroBatch(
            batch=self.collate(traces, self.config.train_split),
            advantages=_flat(batch.advantages),
            weights=token_weights(lengths, denominator, tokens, sequences, self.config.rollout.max_tokens),
            shares=token_weights(lengths, metrics_denominator, tokens, sequences),
            lengths=lengths,
            rollout_logprobs=_flat(rollout) if all_sampled else None,
            old_logprobs=None if batch.old is None else _flat(batch.old),
            ref_logprobs=None if batch.reference is None else _flat(batch.reference),
        )

    def collate(self, traces: Sequence[Trace], split: Split) -> MicroBatch:
        """Packs traces of rows of `split` into one row of tensors."""
        beacon.count_piece()
        return collate(
            traces,
            lambda trace: self.reader.encoded(split, trace.row),
            self.reader.prompter.positions,
            lambda trace: self.dialogs.encoded(split, trace) if self.dialogs else None,
        )

    @cached_property
    def dialogs(self) -> Dialogs | None:
        """Makes what later turns showed again."""
        return dialogs_of(self.config, self.reader)

    def forget_peak(self) -> None:
        """Starts the measurement of the GPU's peak memory anew."""
        if self.process.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _fragments(self) -> dict[str, float]:
        """The metric of the most GiB of GPU memory that lay unused between tensors; no metric on a CPU."""
        if self.process.device.type != "cuda":
            return {}
        peak = torch.cuda.memory_stats()["inactive_split_bytes.all.peak"]
        return {"perf/fragments_gib_max": peak / 2**30}

    def _peak_memory_gib(self) -> float:
        if self.process.device.type == "cuda":
            return (torch.cuda.max_memory_allocated() - self.asleep_bytes) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    # --- weights and checkpoints

    def weights(self, version: int) -> ShardedWeights:
        """The policy's weights, for whoever shares this process."""
        return ShardedWeights(version, self.policy, self.config.rollout.sync_bucket_bytes)

    def weight_groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields copies of the policy's full weights on rank 0; the other ranks only help to gather them."""
        for group in self.weights(0).groups():
            if self.process.rank == 0:
                yield [(name, tensor.detach().cpu().clone()) for name, tensor in group]

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        """`DistributedLearner.save` of this rank's shard."""
        started = time.monotonic()
        self.writer.start(step, self.policy.shards(self.writer.host), {}, keep, send, attempt)
        return time.monotonic() - started

    def send(self, step: int) -> None:
        """Starts to upload what was written of `step`."""
        self.writer.send(step)

    def save_status(self) -> RankStatus:
        """Steps whose files are written, and uploaded. Raises CheckpointError if this rank could not
        write."""
        return self.writer.status()

    def load(self, source: FoundCheckpoint) -> None:
        """Reads this rank's part of a committed checkpoint, written by any number of ranks. Raises
        CorruptCheckpoint. It waits for no other rank: one whose files are damaged must not leave the others
        in a collective."""
        # What the thread has fetched lies on the disk; the reader fetches ranges of the rest.
        if self._fetching:
            wait([self._fetching])
        self.policy.load(ShardReader(source).stream)

    def resume(self, updates: int, skipped: int) -> None:
        """Goes on from the loaded checkpoint, after all ranks have loaded it."""
        self.policy.loaded(updates, skipped)


@dataclass(frozen=True)
class ShardedWeights:
    """A `WeightSource` of the policy's shards. Going through its groups is collective."""

    version: int
    policy: Policy
    bucket_bytes: int

    def groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Every group, gathered on all ranks, for as long as it is looked at."""
        return self.policy.weights.groups(self.bucket_bytes)


def _flat(values: Sequence[np.ndarray]) -> Tensor:
    """Values of all learned tokens of a pass, [N] float32; [0] for a pass without traces."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *values]))


def build_ahead(build: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """Like `map(build, things)`, but builds the next result in a thread. At most two results exist at a
    time."""
    with ThreadPoolExecutor(1, "prefetch") as thread:
        queue = iter(things)
        first = next(queue, None)
        if first is None:
            return
        coming = thread.submit(build, first)
        for thing in queue:
            ready = coming.result()
            coming = thread.submit(build, thing)
            yield ready
            del ready
        yield coming.result()
