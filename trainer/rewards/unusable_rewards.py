"""Rewards that nothing can be learned from: not a number, infinite, or beyond what fp32 can square."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.algorithm.traces import Outcome, Trace
from trainer.config import ConfigError, Rewards
from trainer.system.web_request import shown_address

LARGEST = 1e30
"""Largest size of a reward. Sums of squares of larger ones may leave the range of the numbers."""
SHOWN_CHARS = 200


def reward_origin(rewards: Rewards) -> str:
    """What gave the rewards, in the words of the configuration."""
    if rewards.own:
        return f"rewards.function {' + '.join(function.path for function in rewards.own)}"
    if rewards.remote_url:
        return f"rewards.remote_url {shown_address(rewards.remote_url)}"
    return "the built-in grader"


def describe_reward(rewards: Rewards, trace: Trace, outcome: Outcome) -> str:
    """A reward with what gave it, its row and the end of its completion, on one line."""
    text = " ".join(trace.text.split())
    shown = text if len(text) <= SHOWN_CHARS else f"... {text[-SHOWN_CHARS:]}"
    value = outcome.accuracy if _unusable(outcome.accuracy) else outcome.reward
    return f"{value:g} by {reward_origin(rewards)} for row {trace.row}, completion {shown!r}"


def describe_largest_reward(rewards: Rewards, traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> str:
    """The reward that is furthest from 0, as `describe_reward` says it; empty without rewards."""
    if not outcomes:
        return ""
    trace, outcome = max(zip(traces, outcomes, strict=True), key=lambda pair: abs(pair[1].reward))
    return describe_reward(rewards, trace, outcome)


def refuse_unusable(rewards: Rewards, traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> None:
    """Raises ConfigError, naming the first of them, if a reward is not a finite number up to LARGEST."""
    bad = []
    for trace, outcome in zip(traces, outcomes, strict=True):
        if _unusable(outcome.accuracy) or _unusable(outcome.reward):
            bad.append((trace, outcome))
    if not bad:
        return
    raise ConfigError(
        f"{len(bad)} of {len(outcomes)} rewards are not finite numbers up to {LARGEST:g}:"
        f" {describe_reward(rewards, *bad[0])}. Nothing was learned from this step: correct "
        f"what gives the reward, and"
        " start the run again"
    )


def _unusable(value: float) -> bool:
    return not math.isfinite(value) or abs(value) > LARGEST
