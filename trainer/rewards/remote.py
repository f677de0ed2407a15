"""Client of a reward server for `rewards.remote_url`, by the protocol of OpenRLHF's `--remote_rm_url`:

{"query": [...], "prompts": [...], "labels": [...], "answer_types": [...]}
-> {"rewards": [...]}; `acc_rewards` or `scores`, where it sends them, are the accuracies instead
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError
from trainer.rewards.grade import Grade
from trainer.rewards.grading_client import GradingClient
from trainer.system.backoff import Backoff
from trainer.system.server_waits import Waiter

TOKEN_VARIABLE = "SPOTRL_REWARD_TOKEN"
"""Environment variable with the bearer token."""
BATCH = 256
"""Completions per request."""
PARALLEL = 4
"""Requests that are in flight at once."""
TRIES = Backoff(attempts=6, patience_s=1800.0)
"""Tries of a request whose connection is refused, that gets no reply or a 5xx: a server may be away for half
an hour. One that is busy says when to return."""


class BadReplyError(ConfigError):
    """The reward server's reply cannot be used."""


class RewardClient(GradingClient):
    """Grades over HTTP. Each request holds the reference answers and the questions."""

    def __init__(self, config: configuration.Rewards):
        super().__init__(
            "rewards.remote_url", "reward server", config.remote_url, TOKEN_VARIABLE, TRIES, PARALLEL
        )
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

        graded: list[Grade] = []
        for grades in self.ask_all(self._grades, bodies):
            graded += grades
        return graded

    def _grades(self, waiter: Waiter, body: dict[str, Any]) -> list[Grade]:
        data = json.dumps(body).encode()
        sent = self.ask_until_answered(waiter, partial(self.post, data))
        try:
            reply = json.loads(sent)
        except (ValueError, RecursionError):
            raise BadReplyError(f"{self.name} sent no JSON, but {sent[:80]!r}") from None
        if not isinstance(reply, dict):
            raise BadReplyError(f"{self.name} sent {type(reply).__name__} instead of an object")
        given = (name for name in ("acc_rewards", "scores", "rewards") if reply.get(name) is not None)
        name = next(given, "")
        if not name:
            raise BadReplyError(f"{self.name} sent neither acc_rewards, scores nor rewards")
        accuracies = reply[name]
        expected = len(body["query"])
        if not isinstance(accuracies, list) or len(accuracies) != expected:
            raise BadReplyError(f"{self.name} sent no list of {expected} {name}, one for each completion")

        graded = []
        for accuracy in accuracies:
            if not isinstance(accuracy, int | float):
                raise BadReplyError(
                    f"{self.name} sent {accuracy!r} among its {name}: every one must be a number"
                )
            graded.append(Grade("correct" if accuracy > 0 else "wrong", float(accuracy)))
        return graded
