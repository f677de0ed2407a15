"""What is done again when it fails: a request to a store or a server, a start of Ray."""

from __future__ import annotations

import email.utils
import random
import time
import urllib.error
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
    patience_s: float = 0.0
    """Time for which the call is made again however often it failed: a server may be away."""

    def wait_s(self, failures: int) -> float:
        """Seconds after so many failures, with jitter so that ranks do not return together."""
        longest = min(self.max_wait_s, self.first_wait_s * 2 ** (failures - 1))
        return longest * random.uniform(0.5, 1.0)

    def call(
        self,
        action: Callable[[], T],
        may_pass: Callable[[Exception], bool],
        on_wait: Callable[[Exception, int, float], None] = lambda error, failures, wait_s: None,
    ) -> T:
        """The action's result.

        Raises what the action raised last, or first where `may_pass` of that is false. on_wait: called with
        the error, the number of failures and the seconds, before every wait. A server that says when to
        return (`retry_after_s`) is asked then; such replies do not count as failures while patience lasts.
        """
        failures = 0
        began = time.monotonic()
        while True:
            try:
                return action()
            except Exception as error:
                asked_s = retry_after_s(error)
                left_s = self.patience_s - (time.monotonic() - began)
                if asked_s is not None and asked_s < left_s:
                    wait_s = asked_s * random.uniform(1.0, 1.5)
                else:
                    failures += 1
                    if not may_pass(error) or (failures >= self.attempts and left_s <= 0):
                        raise
                    wait_s = max(self.wait_s(failures), min(asked_s or 0.0, self.max_wait_s))
                    if failures >= self.attempts:
                        wait_s = min(wait_s, left_s)
                on_wait(error, failures, wait_s)
            time.sleep(wait_s)


def retry_after_s(error: BaseException) -> float | None:
    """The seconds after which a busy server (429, 503) wants to be asked again; None: it says nothing."""
    if not isinstance(error, urllib.error.HTTPError) or error.code not in (429, 503):
        return None
    value = error.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
