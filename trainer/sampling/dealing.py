"""Which engine samples which prompt, so that all engines finish at about the same time.

Seeds belong to prompts, so what a completion draws does not depend on the dealing. Its last bits do where a
matrix product depends on its number of rows (docs/fleet.md, "Bits on CPUs"): in bf16, then, its tokens may.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.algorithm.traces import Prompt


def deal_prompts(prompts: Sequence[Prompt], costs: Sequence[float], engines: int) -> list[list[Prompt]]:
    """Shares of about equal cost (longest processing time first), each in the order of the step.

    costs: expected tokens of each prompt with its completions, above 0. A function of its arguments alone, so
    that a resumed run deals as before, and the next step's shares are known while this one is sampled.
    """
    loads, owner = [0.0] * engines, [0] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(engines), key=lambda engine: (loads[engine], engine))
        loads[owner[i]] += costs[i]
    return [
        [prompt for prompt, at in zip(prompts, owner, strict=True) if at == engine]
        for engine in range(engines)
    ]
