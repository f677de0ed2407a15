"""An engine whose completions have the lengths that tests.soak.lengths draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.soak.lengths import lengths
from trainer.algorithm.traces import Trace
from trainer.sampling import vllm_engine


class Engine(vllm_engine.Engine):
    """It samples the longest of a group for all of it, end tokens included, and cuts."""

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


def install() -> None:
    """Ranks of this process start it."""
    vllm_engine.Engine = Engine  # ty: ignore[invalid-assignment]
