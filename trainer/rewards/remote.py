"""Client of a reward server (`server.py`) for `rewards.remote_url`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_args

from trainer import config as configuration
from trainer.algorithm.traces import Verdict
from trainer.config import ConfigError
from trainer.rewards.grade import Grade, ServerAway, one_line
from trainer.rewards.server_failures import failure_reason, is_away
from trainer.system.backoff import Backoff, retry_after_s
from trainer.system.server_waits import Waiter, waiting_for
from trainer.system.web_request import send_request, shown_address

TOKEN_VARIABLE = "SPOTRL_REWARD_TOKEN"
"""Environment variable with the bearer token, on both sides."""
BATCH = 256
"""Completions per request."""
PARALLEL = 4
"""Requests that are in flight at once."""
TRIES = Backoff(attempts=6, patience_s=1800.0)
"""Tries of a request whose connection is refused, that gets no reply or a 5xx: a server may be away for half
an hour. One whose queue is full says when to return."""


class BadReplyError(ConfigError):
    """The reward server's reply cannot be used."""


class RewardClient:
    """Grades over HTTP. Each request holds the reference answers and the questions."""

    def __init__(self, config: configuration.Rewards):
        self.url = config.remote_url
        self.name = f"rewards.remote_url {shown_address(self.url)}"
        """Name of the server in messages, without a token that the query may hold."""
        self.busy = 0
        """Requests that a full queue sent back, since the start."""
        self.timeout_s = 60.0 + BATCH * config.deadline_s / max(config.workers, 1)

    def grade(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        answer_types: Sequence[str],
        questions: Sequence[str],
    ) -> list[Grade]:
        """The grade of each completion.

        Raises:
            ConfigError: it refuses the request, or its reply cannot be used.
            ServerAway: it has not answered for as long as TRIES waits.
        """
        columns = {"query": texts, "prompts": questions, "labels": references, "answer_types": answer_types}
        bodies = []
        for i in range(0, len(texts), BATCH):
            bodies.append({name: list(values[i : i + BATCH]) for name, values in columns.items()})

        longest_s = len(bodies) * (TRIES.patience_s + TRIES.attempts * self.timeout_s)
        graded: list[Grade] = []
        with (
            waiting_for("grading", f"the reward server at {shown_address(self.url)}", longest_s) as waiter,
            ThreadPoolExecutor(PARALLEL) as threads,
        ):
            for reply in threads.map(partial(self._post, waiter), bodies):
                graded += reply
        return graded

    def _post(self, waiter: Waiter, body: dict[str, Any]) -> list[Grade]:
        headers = {"Content-Type": "application/json"}
        token = os.environ.get(TOKEN_VARIABLE)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps(body).encode()

        def send() -> bytes:
            return send_request(self.url, method="POST", body=data, headers=headers, timeout_s=self.timeout_s)

        def tell(error: Exception, _: int, __: float) -> None:
            self.busy += retry_after_s(error) is not None
            waiter.failed(failure_reason(error))

        began = time.monotonic()
        try:
            reply = TRIES.call(send, is_away, tell)
        except OSError as error:
            if not is_away(error):
                raise ConfigError(f"{self.name} {failure_reason(error)}") from None
            waited_s = time.monotonic() - began
            raise ServerAway(
                f"{self.name} has answered nothing for {waited_s:.0f} s: {failure_reason(error)}"
            ) from None
        return self._grades(reply, len(body["query"]))

    def _grades(self, body: bytes, expected: int) -> list[Grade]:
        """The grade of each completion, from `server.py` or from a server in OpenRLHF's format.

        The latter sends no verdicts; its `scores`, or else its `rewards`, are the accuracies.
        """
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            raise BadReplyError(f"{self.name} sent no JSON, but {body[:80]!r}") from None
        if not isinstance(reply, dict):
            raise BadReplyError(f"{self.name} sent {type(reply).__name__} instead of an object")
        sent = (name for name in ("acc_rewards", "scores", "rewards") if reply.get(name) is not None)
        name = next(sent, "")
        if not name:
            raise BadReplyError(f"{self.name} sent neither acc_rewards, scores nor rewards")
        accuracies = reply[name]
        verdicts: list[Verdict] | None = reply.get("verdicts")
        whys: list[str] | None = reply.get("whys")
        for key, values in ((name, accuracies), ("verdicts", verdicts), ("whys", whys)):
            if values is not None and (not isinstance(values, list) or len(values) != expected):
                raise BadReplyError(f"{self.name} sent no list of {expected} {key}, one for each completion")
        unknown = set(map(str, verdicts or ())) - set(get_args(Verdict))
        if unknown:
            raise BadReplyError(
                f"{self.name} sent the unknown verdict {min(unknown)!r}: use {get_args(Verdict)}"
            )

        graded: list[Grade] = []
        for i, accuracy in enumerate(accuracies):
            verdict = verdicts[i] if verdicts else None
            if accuracy is None and verdict == "error":
                # Our server sends null for an accuracy that is not finite, which JSON does not have.
                accuracy = math.nan
            if not isinstance(accuracy, int | float):
                raise BadReplyError(
                    f"{self.name} sent {accuracy!r} among its {name}: every one must be a number"
                )
            why = ""
            if verdict in ("timeout", "error"):
                given = f": {one_line(str(whys[i]))}" if whys and whys[i] else f" sent the verdict {verdict}"
                why = self.name + given
            graded.append(Grade(verdict or ("correct" if accuracy > 0 else "wrong"), float(accuracy), why))
        return graded
