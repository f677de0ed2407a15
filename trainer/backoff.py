"""What is done again when it fails: a request to a store or a server, a start of Ray."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """How often a call is made at most, and how long is waited in between."""

    attempts: int
    first_wait_s: float = 1.0
    """Wait after the first failure; it doubles with each."""
    max_wait_s: float = 60.0

    def wait_s(self, failures: int) -> float:
        """Seconds after so many failures, with jitter so that ranks do not return together."""
        longest = min(self.max_wait_s, self.first_wait_s * 2 ** (failures - 1))
        return longest * random.uniform(0.5, 1.0)

    def call(
        self,
        action: Callable[[], T],
        may_pass: Callable[[Exception], bool],
        told: Callable[[Exception, int, float], None] = lambda error, failures, wait_s: None,
    ) -> T:
        """The action's result.

        Raises what the action raised last, or first where `may_pass` of that is false. told: called with
        the error, the number of failures and the seconds, before every wait.
        """
        failures = 0
        while True:
            try:
                return action()
            except Exception as error:
                failures += 1
                if failures >= self.attempts or not may_pass(error):
                    raise
                wait_s = self.wait_s(failures)
                told(error, failures, wait_s)
            time.sleep(wait_s)
