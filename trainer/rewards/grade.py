"""What a grader gives for one completion, and the exceptions for graders that can give nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.system.errors import ConfigError, StorageError
from trainer.system.redaction import without_secrets

if TYPE_CHECKING:  # NumPy comes with it, which a desk may lack
    from trainer.algorithm.traces import Verdict


@dataclass(frozen=True)
class Grade:
    """The grade of one completion."""

    verdict: Verdict
    accuracy: float
    why: str = ""
    """For `timeout` and `error`: which grader failed, and how, on one line."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each of several reward functions gave, by name, before its weight."""
    rule: str = ""
    """What decided, where the built-in grader did: exact, points or text (`grading.expression.Rule`)."""


class ErrorRateError(ConfigError):
    """More completions of one batch ended in errors than `rewards.max_error_rate` allows."""


class TimeoutRateError(ConfigError):
    """More completions of one batch timed out than `rewards.max_timeout_rate` allows."""


class ServerAway(StorageError):
    """A reward server or a judge did not answer for as long as its client waits."""


def grade_of(result: list, blamed: str) -> Grade:
    """The grade in a result of a grader process. blamed: whom to name where the result does not."""
    verdict, accuracy, *rest = result
    why, parts, *rules = rest or ("", {})
    if verdict == "error" and not why:
        why = "the reference answer cannot be read, or no arithmetic tells the answer from it"
    if why and not why.startswith(("rewards.", blamed)):
        why = f"{blamed}: {why}"
    return Grade(verdict, accuracy, why, parts, *rules)


def one_line(text: str, chars: int = 300) -> str:
    """A text of somebody else's for a line of ours, without secrets."""
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= chars else f"{text[:chars]}…"
