"""Engines in the processes of the policy's own ranks: an engine of n GPUs lives in n neighboring ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.algorithm.traces import Prompt
from trainer.config import RunConfig
from trainer.learning.distributed import RankWeights
from trainer.ranks.ray_ranks import RayRanks
from trainer.sampling.sampler import SampledGroups, SamplingRequest
from trainer.sampling.sampler_part import SamplerPart
from trainer.weights.source import WeightSource


class Colocated:
    """A `Sampler` that shares its GPUs with the learner: `load` wakes the engines, `rest` puts them to
    sleep."""

    overlaps_learning = False

    def __init__(self, config: RunConfig, ranks: RayRanks) -> None:
        self.config, self.ranks = config, ranks
        self.version = -1

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.ranks.world_size // self.config.rollout.tensor_parallel

    def start(self) -> None:
        """Builds the engines, after the learner has loaded the policy."""
        self.ranks.all(SamplerPart.start)

    def load(self, weights: WeightSource) -> None:
        """`Sampler.load`: every rank takes its part of the weights from the policy in its own process."""
        if not isinstance(weights, RankWeights) or weights.ranks is not self.ranks:
            raise ValueError(
                "colocated engines take weights from the ranks that they share, and from nowhere else"
            )
        self.ranks.all(SamplerPart.load, weights.version)
        self.version = weights.version

    def sample(self, ask: SamplingRequest) -> SampledGroups:
        """`Sampler.sample`: prompts are dealt so that all engines should finish together. It returns when
        they have, for the GPUs can do nothing else meanwhile. Raises ValueError for weights that are not
        loaded."""
        if ask.version != self.version:
            raise ValueError(
                f"step {ask.step} is sampled with version {ask.version} of the weights, and the engines hold"
                f" version {self.version}"
            )
        now, later = self._now(ask), self._shares(ask, ask.upcoming)
        calls = []
        for rank in range(self.ranks.world_size):
            engine = rank // self.config.rollout.tensor_parallel
            rows = [prompt.row for prompt in later[engine]]
            how = ask.samples_per_prompt, ask.temperature, ask.top_p, ask.max_tokens
            groups = {prompt.group for prompt in now[engine]}
            begun = [trace for trace in ask.begun if trace.group in groups and trace.end == "cut"]
            calls.append((now[engine], ask.split, *how, rows, begun))
        return SampledGroups(self.ranks.stream(SamplerPart.sample, calls))

    def _now(self, ask: SamplingRequest) -> list[list[Prompt]]:
        """Prompts by engine, without those whose completions have all ended. Each step's prompts are dealt by
        themselves: so a completion goes on where its images were decoded, and new prompts go where the last
        ask's `upcoming` said."""
        size = self.config.rollout.prompts_per_step if ask.kind == "train" else max(1, len(ask.prompts))
        cut = {trace.group for trace in ask.begun if trace.end == "cut"}
        ended = {trace.group for trace in ask.begun} - cut
        shares: list[list[Prompt]] = [[] for _ in range(self.engines)]
        for start in range(0, len(ask.prompts), size):
            dealt_out = self._shares(ask, ask.prompts[start : start + size])
            for share, dealt in zip(shares, dealt_out, strict=True):
                share += [prompt for prompt in dealt if prompt.group not in ended]
        return shares

    def _shares(self, ask: SamplingRequest, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Prompts of one step by engine."""
        # Nobody knows a completion's length before it is sampled: half of the longest weighs it against the
        # prompt.
        unknown = ask.samples_per_prompt * ask.max_tokens / 2
        costs = [float(ask.prompt_tokens[prompt.row]) + unknown for prompt in prompts]
        return deal_prompts(prompts, costs, self.engines)

    def rest(self) -> None:
        """`Sampler.rest`."""
        self.ranks.all(SamplerPart.rest)

    def close(self) -> None:
        """`Sampler.close`: the engines end with the ranks' processes."""


def deal_prompts(prompts: Sequence[Prompt], costs: Sequence[float], engines: int) -> list[list[Prompt]]:
    """Shares of about equal cost (longest processing time first), each in the order of the step. costs:
    expected tokens of each prompt with its completions, above 0. A function of its arguments alone, so that a
    resumed run deals as before, and the next step's shares are known while this one is sampled."""
    loads, owner = [0.0] * engines, [0] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(engines), key=lambda engine: (loads[engine], engine))
        loads[owner[i]] += costs[i]
    return [
        [prompt for prompt, at in zip(prompts, owner, strict=True) if at == engine]
        for engine in range(engines)
    ]
