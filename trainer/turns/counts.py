"""What a step's episodes did, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainer.algorithm.traces import Trace
from trainer.turns.calls import BadCallError, call_in
from trainer.turns.episode import ERROR, FAILED


def describe_episodes(traces: Sequence[Trace], tools: Sequence[str] = ()) -> dict[str, float]:
    """`turns/*` of a step. tools: names of the tools that prompts offer."""
    counted: Counter[str] = Counter()
    calls = dict.fromkeys(tools, 0)
    observed_tokens = 0
    for trace in traces:
        for reply, observation in zip(trace.dialog[::2], trace.dialog[1::2], strict=True):
            counted["observations"] += 1
            counted["errors"] += observation.startswith(ERROR)
            counted["failed"] += observation.startswith(FAILED)
            name = _called(reply) if tools else ""
            if name in calls:
                calls[name] += 1
        counted[trace.end] += 1
        observed_tokens += len(trace.completion) - len(trace.learned)
    n = len(traces)
    observations = counted["observations"] or 1
    described = {
        "turns/replies_mean": 1 + counted["observations"] / n,
        "turns/errors_mean": counted["errors"] / n,
        "turns/error_fraction": counted["errors"] / observations,
        "turns/failed_fraction": counted["failed"] / observations,
        "turns/limit_fraction": counted["turns"] / n,
        "turns/images_fraction": counted["images"] / n,
        "turns/observed_tokens_mean": observed_tokens / n,
    }
    return described | {f"turns/calls_{name}_mean": count / n for name, count in calls.items()}


def names_of(tools: Sequence[dict]) -> list[str]:
    """Names of tools, from their schemas."""
    return [tool["function"]["name"] for tool in tools]


def usual_failure(traces: Sequence[Trace]) -> str:
    """The failure of tools that a step's observations tell of most often, and its number; "" if none does."""
    failures: Counter[str] = Counter()
    for trace in traces:
        failures.update(observed for observed in trace.dialog[1::2] if observed.startswith(FAILED))
    if not failures:
        return ""
    (observed, times), *_ = failures.most_common(1)
    return f"{observed[:200]!r} ({times} times)"


def _called(reply: str) -> str:
    try:
        call = call_in(reply)
    except BadCallError:
        return ""
    return call.name if call else ""
