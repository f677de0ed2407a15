"""One rank's parts in a test's own process, without a driver. Not a test itself."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import torch

from trainer.algorithm.batching import MicroBatch, TrainBatch, trace_length
from trainer.algorithm.scheduling import schedule_passes
from trainer.algorithm.traces import Prompt, Trace, completed_trace
from trainer.config import RunConfig
from trainer.learning.learner_part import LearnerPart
from trainer.ranks.process import RankProcess
from trainer.sampling.sampler_part import SamplerPart


class OneRank:
    """A rank's process with policy and, for method grpo, an engine."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.process = RankProcess(config)
        self.reader = self.process.reader
        self.learner = self.process.part(LearnerPart)

    def start(self, rank: int, port: int, total_updates: int = 10) -> OneRank:
        """Loads policy and engine together with the other ranks at this port of this machine."""
        self.process.set_rank(rank, rank, "127.0.0.1", port)
        self.learner.start(total_updates)
        if self.config.method == "grpo":
            self.sampler.start()
        return self

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def policy(self):
        return self.learner.policy

    @property
    def sampler(self) -> SamplerPart:
        return self.process.part(SamplerPart)

    @property
    def engine(self):
        return self.sampler.engine

    @property
    def prompter(self):
        return self.reader.prompter

    @property
    def train_set(self):
        return self.reader.datasets[self.config.train_split]

    def prompt_ids(self, row: int) -> list[int]:
        """Token ids of a training row's prompt."""
        return self.reader.encoded(self.config.train_split, row).token_ids

    def sample(
        self,
        prompts: list[Prompt],
        count: int,
        temperature: float,
        max_tokens: int = 0,
        top_p: float = 1.0,
    ) -> list[Trace]:
        """Completions of these prompts by this rank's engine, on every rank of it, by group and index."""
        groups = self.engine.generate(
            prompts,
            lambda prompt: self.reader.request(self.config.train_split, prompt.row),
            samples_per_prompt=count,
            temperature=temperature,
            max_tokens=max_tokens or self.config.rollout.max_tokens,
            top_p=top_p,
        )
        return sorted((trace for group in groups for trace in group), key=lambda t: (t.group, t.index))

    def collate(self, traces: list[Trace]) -> MicroBatch:
        return self.learner.collate(traces, self.config.train_split)

    def logprobs(self, passes: list[list[Trace]], *, old: bool = True, reference: bool = False):
        return self.learner.logprobs(passes, self.config.train_split, old, reference)

    def update(
        self, passes: list[TrainBatch], tokens: int, sequences: int, kl_coef: float = 0.0
    ) -> dict[str, float]:
        return self.learner.update(passes, tokens, sequences, kl_coef)

    def step(
        self, batch: TrainBatch, budget: int, order: list[list[list[int]]] | None = None, kl_coef: float = 0.0
    ):
        """One optimizer step over the batch in passes of `budget` tokens, or in those of `order`
        ([rank][pass])."""
        image = self.prompter.image_token_id or -1
        lengths = [trace_length(trace, image) for trace in batch.traces]
        plan = order or schedule_passes(lengths, self.config.placement.world_size, budget)
        passes = [batch.pick(members) for members in plan[self.rank]]
        return self.update(passes, batch.tokens, len(batch), kl_coef)


def trainable(traces: list[Trace], advantages: list[float]) -> TrainBatch:
    """Traces with one advantage each."""
    by_token = [np.full(len(t.learned), a, np.float32) for t, a in zip(traces, advantages, strict=True)]
    return TrainBatch(traces, by_token)


def trace(row: int, prompt_ids, completion_ids, **about) -> Trace:
    """A trace whose group is its row."""
    return completed_trace(prompt_ids, completion_ids, group=row, row=row, **about)


def with_logprobs(batch: TrainBatch, rollout: list, old: list) -> TrainBatch:
    """The batch as if an engine had sampled it with these log-probabilities, and with these old ones."""
    arrays = [np.asarray(values, np.float32) for values in rollout]
    traces = [replace(t, logprobs=values) for t, values in zip(batch.traces, arrays, strict=True)]
    return replace(batch, traces=traces, old=[np.asarray(values, np.float32) for values in old])


def same(a: Trace, b: Trace) -> bool:
    """Whether two traces are equal to the bit, arrays and their types included."""
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            if (
                not isinstance(other, np.ndarray)
                or value.dtype != other.dtype
                or value.tobytes() != other.tobytes()
            ):
                return False
        elif value != other:
            return False
    return True


def held_bytes() -> int:
    """Bytes of all CPU tensors that Python knows; each storage once. Tensors without a storage of their own,
    such as the FakeTensors that torch.compile leaves, hold nothing and refuse to name one."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or found.device.type != "cpu":
            continue
        storage = found.untyped_storage()
        try:
            storages[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:
            continue
    return sum(storages.values())
