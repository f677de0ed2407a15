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
from typing import Any

from trainer.algorithm.traces import Prompt
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


class SoakSampler(SamplerPart):
    """A rank with an engine that cuts where `lengths` says."""

    def start(self) -> None:
        from tests.soak import engine  # in the ranks alone: it loads vLLM

        engine.install()
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
