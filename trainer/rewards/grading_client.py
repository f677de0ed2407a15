"""What the clients of a reward server and of a judge have in common: how they ask, and how they wait."""

from __future__ import annotations

import math
import os
import ssl
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from trainer.config import ConfigError
from trainer.rewards.grade import ServerAway, one_line
from trainer.system.backoff import Backoff
from trainer.system.server_waits import Waiter, waiting_for
from trainer.system.web_request import MOST_BYTES, send_request, shown_address

PASSING_CODES = (408, 425, 429)
"""Codes below 500 after which the same request may succeed."""
T = TypeVar("T")
R = TypeVar("R")


def is_away(error: BaseException) -> bool:
    """Whether a server may be busy, stopped or gone for a while, so that it is asked again."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 and error.code != 501 or error.code in PASSING_CODES
    if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
        return False
    return isinstance(error, OSError)


def failure_reason(error: BaseException) -> str:
    """What a server answered, or why it did not, on one line."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            detail = error.read(500).decode(errors="replace")
        except ValueError:  # closed
            detail = ""
        return f"answers {error.code}: {one_line(detail or str(error.reason))}"
    cause = getattr(error, "reason", error)
    return f"cannot be reached: {one_line(str(cause)) or type(cause).__name__}"


class GradingClient:
    """Sends requests to one server, several at once; waits for it while it is away."""

    timeout_s: float
    most_bytes = MOST_BYTES
    """Longest reply."""

    def __init__(self, key: str, title: str, url: str, token_variable: str, tries: Backoff, parallel: int):
        """key: the option that names the server. title: what a person calls it. parallel: requests that are
        in flight at once."""
        self.url = url
        self.name = f"{key} {shown_address(url)}"
        """Name of the server in messages, without a token that the query may hold."""
        self.title = f"the {title} at {shown_address(url)}"
        self.token_variable = token_variable
        self.tries = tries
        self.parallel = parallel
        self.answered_s = -math.inf
        """When it last answered one of several requests that are decided apart."""

    def ask_all(self, ask: Callable[[Waiter, T], R], requests: Sequence[T]) -> list[R]:
        """The result of `ask` for each request, in order."""
        rounds = math.ceil(len(requests) / self.parallel)
        longest_s = self.tries.attempts * (self.timeout_s + self.tries.max_wait_s)
        with (
            waiting_for("grading", self.title, self.tries.patience_s + rounds * longest_s) as waiter,
            ThreadPoolExecutor(self.parallel, "grading") as threads,
        ):
            return list(threads.map(partial(ask, waiter), requests))

    def post(self, body: bytes) -> bytes:
        """One try of a request, all of whose reply must arrive within `timeout_s`."""
        headers = {"Content-Type": "application/json"}
        token = os.environ.get(self.token_variable)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return send_request(
            self.url,
            method="POST",
            body=body,
            headers=headers,
            timeout_s=self.timeout_s,
            most_bytes=self.most_bytes,
        )

    def ask_until_answered(
        self, waiter: Waiter, send: Callable[[], T], may_pass: Callable[[Exception], bool] = is_away
    ) -> T:
        """What `send` returns, which is called again while its failures may pass.

        Raises:
            ConfigError: the server refuses the request.
            ServerAway: it has answered nothing for as long as `tries` waits.
            OSError: it answers others, and never this one.
        """
        began = time.monotonic()
        try:
            return self.tries.call(send, may_pass, lambda error, *_: waiter.failed(self.reason(error)))
        except OSError as error:
            if not is_away(error):
                raise ConfigError(f"{self.name} {self.reason(error)}") from None
            if self.answered_s >= began:
                raise
            waited_s = time.monotonic() - began
            raise ServerAway(
                f"{self.name} has answered nothing for {waited_s:.0f} s: {self.reason(error)}"
            ) from None

    def reason(self, error: Exception) -> str:
        """Why a request failed, for a person."""
        return failure_reason(error)
