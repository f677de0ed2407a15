"""An engine whose completions have the lengths that tests.soak.lengths draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm import SamplingParams

from tests.soak.lengths import lengths
from trainer.algorithm.records import Prompt, Sample
from trainer.data.processor import Request
from trainer.sampling import vllm_engine as rollout


class Engine(rollout.Engine):
    """It samples the longest of a group for all of it, and cuts."""

    def _params(self, prompt: Prompt, n: int, temperature: float, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=temperature,
            max_tokens=max(lengths(prompt, n)),
            seed=prompt.seed if temperature else None,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            flat_logprobs=True,
        )

    def _samples(self, prompt: Prompt, request: Request, output: Any) -> list[Sample]:
        whole = super()._samples(prompt, request, output)
        return [
            replace(sample, token_ids=sample.token_ids[:n], logprobs=sample.logprobs[:n], finished=False)
            for sample, n in zip(whole, lengths(prompt, len(whole)), strict=True)
        ]


def install() -> None:
    """Workers of this process start it."""
    rollout.Engine = Engine  # ty: ignore[invalid-assignment]
