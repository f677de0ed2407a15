"""The real loop whose completions are as long as a test wants: `python -m tests.soak.lengths --config
run.yaml`.

No random model ends completions as a trained one does. Here the engine samples as many tokens as the longest
completion of a group shall have, end tokens included, and each completion is cut where a length drawn from
its prompt's seed says, as `max_tokens` would cut it. SOAK_ROWS names the rows of which one completion has
SOAK_LONGEST tokens; the mean of all others is SOAK_MEAN.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.algorithm.traces import Prompt, Trace
from trainer.loops import grpo
from trainer.loops.process import main
from trainer.ranks import ray_ranks
from trainer.ranks.process import RankProcess
from trainer.sampling.sampler_part import SamplerPart

CUT = 150
"""No other completion is longer."""


def environment(rows: Sequence[int], longest: int, mean: float) -> Mapping[str, str]:
    """What a job of this module needs."""
    return {"SOAK_ROWS": " ".join(map(str, rows)), "SOAK_LONGEST": str(longest), "SOAK_MEAN": str(mean)}


def lengths(prompt: Prompt, n: int) -> list[int]:
    """Tokens of each of n completions, log-normal."""
    rng, center = (
        random.Random(f"{prompt.seed} {prompt.row}"),
        math.log(float(os.environ["SOAK_MEAN"])) - 0.18,
    )
    drawn = [max(1, min(CUT, round(rng.lognormvariate(center, 0.6)))) for _ in range(n)]
    if n > 1 and str(prompt.row) in os.environ["SOAK_ROWS"].split():
        drawn[0] = int(os.environ["SOAK_LONGEST"])
    return drawn


def soak_engine(base: type) -> type:
    """An engine that samples the longest of a group for all of it, end tokens included, and cuts."""

    class Engine(base):
        def _params(self, group: Any, index: int, temperature: float, max_tokens: int, top_p: float) -> Any:
            longest = max(lengths(group.prompt, len(group.begun)))
            params = super()._params(group, index, temperature, longest, top_p)
            params.ignore_eos = True
            params.stop_token_ids = []
            return params

        def _trace(self, group: Any, index: int, output: Any, max_tokens: int) -> Trace:
            whole = super()._trace(group, index, output, max_tokens)
            count = lengths(group.prompt, len(group.begun))[index]
            return replace(
                whole,
                tokens=whole.tokens[: whole.shared + count],
                learned=whole.learned[:count],
                logprobs=None if whole.logprobs is None else whole.logprobs[:count],
                end="length",
            )

    return Engine


class SoakSampler(SamplerPart):
    """A rank with an engine that cuts where `lengths` says."""

    def start(self) -> None:
        from trainer.sampling import vllm_engine  # in the ranks alone: it loads vLLM

        vllm_engine.Engine = soak_engine(vllm_engine.Engine)
        super().start()


class SoakProcess(RankProcess):
    """A process with such a rank."""

    def part(self, kind: Any) -> Any:
        if kind is SamplerPart and kind not in self._parts:
            self._parts[kind] = SoakSampler(self)
        return super().part(kind)


if __name__ == "__main__":
    ray_ranks.RankProcess = SoakProcess
    main(grpo.train, grpo.total_updates)
