"""What a step's episodes did, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.algorithm.traces import Trace
from trainer.turns.episode import ERROR


def describe_episodes(traces: Sequence[Trace]) -> dict[str, float]:
    """`turns/*` of a step."""
    observations = 0
    errors = 0
    observed_tokens = 0
    limited = 0
    for trace in traces:
        for observation in trace.dialog[1::2]:
            observations += 1
            errors += observation.startswith(ERROR)
        observed_tokens += len(trace.completion) - len(trace.learned)
        limited += trace.end == "turns"
    n = len(traces)
    return {
        "turns/replies_mean": 1 + observations / n,
        "turns/errors_mean": errors / n,
        "turns/limit_fraction": limited / n,
        "turns/observed_tokens_mean": observed_tokens / n,
    }
