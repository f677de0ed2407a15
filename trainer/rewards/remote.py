"""Client of a reward server (`server.py`) for `rewards.remote_url`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

from trainer import config as configuration
from trainer.algorithm.traces import Verdict
from trainer.backoff import Backoff, retry_after_s

TOKEN_VARIABLE = "SPOTRL_REWARD_TOKEN"
"""Environment variable with the bearer token, on both sides."""
BATCH = 256
"""Completions per request."""
PARALLEL = 4
"""Requests that are in flight at once."""
TRIES = Backoff(attempts=6, patience_s=1800.0)
"""Tries of a request whose connection is refused or whose reply is a 5xx. A server whose queue is full says
when to return, and is waited for."""
TELL_S = 60.0
"""Seconds between two lines about a server that is busy."""


class BadReplyError(RuntimeError):
    """The reward server's reply cannot be used."""


class Client:
    """Grades over HTTP. Each request holds the reference answers and the questions."""

    def __init__(self, config: configuration.Rewards):
        self.url = config.remote_url
        self.name = f"rewards.remote_url {self.url.partition('?')[0]}"
        """Name of the server in messages, without a token that the query may hold."""
        self.busy = 0
        """Requests that a full queue sent back, since the start."""
        self._told = -math.inf
        self.timeout_s = 60.0 + BATCH * config.deadline_s / max(config.workers, 1)

    def grade(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        answer_types: Sequence[str],
        questions: Sequence[str],
    ) -> list[tuple[Verdict, float]]:
        """(verdict, accuracy) of each completion. Raises ConnectionError, BadReplyError."""
        columns = {"query": texts, "prompts": questions, "labels": references, "answer_types": answer_types}
        bodies = []
        for i in range(0, len(texts), BATCH):
            bodies.append({name: list(values[i : i + BATCH]) for name, values in columns.items()})

        graded: list[tuple[Verdict, float]] = []
        with ThreadPoolExecutor(PARALLEL) as threads:
            for reply in threads.map(self._post, bodies):
                graded += reply
        return graded

    def _post(self, body: dict[str, Any]) -> list[tuple[Verdict, float]]:
        headers = {"Content-Type": "application/json"}
        token = os.environ.get(TOKEN_VARIABLE)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps(body).encode()

        def send() -> list[tuple[Verdict, float]]:
            request = urllib.request.Request(self.url, data=data, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                reply = json.load(response)
            return self._verdicts(reply, len(body["query"]))

        try:
            return TRIES.call(send, _may_pass, self._tell)
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode(errors="replace")
            raise ConnectionError(f"{self.name} answers {error.code}: {detail}") from None
        except _BROKEN as error:
            reason = getattr(error, "reason", error)
            raise ConnectionError(f"{self.name} cannot be reached: {reason}") from None

    def _tell(self, error: Exception, _: int, wait_s: float) -> None:
        """Counts the replies of a full queue, and tells of them once in a while."""
        if retry_after_s(error) is None:
            return
        self.busy += 1
        now = time.monotonic()
        if now - self._told > TELL_S:
            self._told = now
            print(f"{self.name} is busy: again in {wait_s:.0f} s ({self.busy} times so far)", file=sys.stderr)

    def _verdicts(self, reply: Any, expected: int) -> list[tuple[Verdict, float]]:
        """(verdict, accuracy) of each completion, from `server.py` or from a server in OpenRLHF's format.

        The latter sends no verdicts; its `scores`, or else its `rewards`, are the accuracies.
        """
        if not isinstance(reply, dict):
            raise BadReplyError(f"{self.name} sent {type(reply).__name__} instead of an object")
        name = "rewards"
        for candidate in ("acc_rewards", "scores", "rewards"):
            if reply.get(candidate) is not None:
                name = candidate
                break
        accuracies = reply.get(name)
        verdicts: list[Verdict] | None = reply.get("verdicts")
        for values in (accuracies, verdicts):
            if values is not None and (not isinstance(values, list) or len(values) != expected):
                raise BadReplyError(f"{self.name} sent no list of {expected} {name}, one for each completion")
        if accuracies is None:
            raise BadReplyError(f"{self.name} sent neither acc_rewards, scores nor rewards")

        graded: list[tuple[Verdict, float]] = []
        for i, sent in enumerate(accuracies):
            verdict = verdicts[i] if verdicts else None
            accuracy = sent
            if accuracy is None and verdict == "error":
                # Our server sends null for an accuracy that is not finite, which JSON does not have.
                accuracy = math.nan
            if not isinstance(accuracy, int | float):
                raise BadReplyError(
                    f"{self.name} sent {accuracy!r} among its {name}: every one must be a number"
                )
            if verdict is None:
                verdict = "correct" if accuracy > 0 else "wrong"
            graded.append((verdict, float(accuracy)))

        unknown = set(map(str, verdicts or ())) - set(get_args(Verdict))
        if unknown:
            raise BadReplyError(
                f"{self.name} sent the unknown verdict {min(unknown)!r}: use {get_args(Verdict)}"
            )
        return graded


_BROKEN = (urllib.error.URLError, TimeoutError, ConnectionError, json.JSONDecodeError)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500
    return isinstance(error, _BROKEN)
