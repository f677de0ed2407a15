"""One rank's part of a worker's engine. All ranks of an engine make the same calls in the same order."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from trainer.algorithm.traces import Trace
from trainer.config import ConfigError, RunConfig, Split
from trainer.fleet.units import RolloutUnit
from trainer.ranks.process import RankProcess
from trainer.weights.broadcast import Broadcast
from trainer.weights.source import WeightSource

MEETING = "ranks"
"""File in the worker's own folder through which its ranks find each other."""


class EnginePart:
    """Its process is made as a trainer's rank is, so that both compute the same."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        """Raises ConfigError where the machine has no GPU for the rank, or the data is damaged."""
        self.config = config
        self.ranks = config.rollout.tensor_parallel
        if config.placement.device == "cuda" and torch.cuda.device_count() < self.ranks:
            raise ConfigError(
                f"rollout.tensor_parallel is {self.ranks}, and {torch.cuda.device_count()} GPUs are visible"
                " here: give the worker as many GPUs, or set rollout.tensor_parallel to less"
            )
        self.process = RankProcess(config)
        self.process.meet(rank, rank, "127.0.0.1", 0)  # they meet by a file, so no port is taken
        self.reader = self.process.reader
        if self.ranks > 1:
            self._check_heads()
        self._splits: dict[Literal["train", "evaluation"], Split] = {
            "train": config.train_split,
            "evaluation": config.evaluation_split,
        }

    def _check_heads(self) -> None:
        heads = self.reader.prompter.hf_config.get_text_config().num_attention_heads
        if heads % self.ranks:
            raise ConfigError(
                f"rollout.tensor_parallel {self.ranks} does not divide the model's {heads} attention heads:"
                f" use a divisor of {heads}"
            )

    def build(self) -> None:
        """Meets the other ranks and builds the engine, without weights. Collective."""
        # Here, so that the environment is set before anything of vLLM is loaded.
        from trainer.sampling.vllm_engine import Engine

        dist.init_process_group(
            "nccl" if self.process.device.type == "cuda" else "gloo",
            store=dist.FileStore(f"{self.config.run.dir}/{MEETING}", self.ranks),
            rank=self.process.rank,
            world_size=self.ranks,
        )
        self.engine = Engine(self.config, self.reader.prompter, self.reader.images_per_prompt())

    def load(self, version: int, source: WeightSource | None) -> None:
        """Replaces the engine's weights. source: where rank 0 has them; None on every other rank.
        Collective."""
        from trainer.weights import in_process

        if source is None or self.ranks > 1:
            source = Broadcast(version, self.process.device, source)
        in_process.push(source, self.engine)

    def sample(self, unit: RolloutUnit) -> list[Trace]:
        """A unit's traces, which every rank gets. Collective."""
        split = self._splits[unit.split]
        groups = self.engine.generate(
            unit.prompts,
            lambda prompt: self.reader.request(split, prompt.row),
            samples_per_prompt=unit.samples_per_prompt,
            temperature=unit.temperature,
            top_p=unit.top_p,
            max_tokens=unit.max_tokens,
            with_routes=unit.with_routes,
        )
        return [trace for group in groups for trace in group]

    def forget_prefixes(self) -> None:
        """Other units' prefixes were computed in other batches: a unit is a function of itself alone."""
        self.engine.reset_caches()
