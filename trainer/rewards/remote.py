"""Client of a reward server (`server.py`) for `rewards.remote_url`."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer import config as configuration
from trainer.algorithm.records import Verdict

TOKEN_VARIABLE = "SPOTRL_REWARD_TOKEN"
"""Environment variable with the bearer token, on both sides."""
BATCH = 256
"""Answers per request."""
PARALLEL = 4
"""Requests under way at once."""
RETRIES = 5
"""Further tries after a refused connection, a 5xx or a shed load; waits of 1, 2, 4, 8, 16 s."""


class Client:
    """Grades over HTTP. Labels travel with the request."""

    def __init__(self, config: configuration.Rewards):
        self.url = config.remote_url
        self.timeout_s = 60.0 + BATCH * config.deadline_s / max(config.workers, 1)

    def grade(
        self, texts: Sequence[str], golds: Sequence[str], answer_types: Sequence[str]
    ) -> list[tuple[Verdict, float]]:
        """(verdict, accuracy) per answer. Raises ConnectionError when the server stays away or refuses."""
        starts = range(0, len(texts), BATCH)
        bodies = [
            {"query": list(texts[i : i + BATCH]), "prompts": [""] * len(texts[i : i + BATCH]),
             "labels": list(golds[i : i + BATCH]), "answer_types": list(answer_types[i : i + BATCH])}
            for i in starts
        ]  # fmt: skip
        with ThreadPoolExecutor(PARALLEL) as threads:
            replies = list(threads.map(self._post, bodies))
        return [pair for reply in replies for pair in reply]

    def _post(self, body: dict[str, Any]) -> list[tuple[Verdict, float]]:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps(body).encode()
        for attempt in range(RETRIES + 1):
            try:
                request = urllib.request.Request(self.url, data=data, headers=headers, method="POST")
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    reply = json.load(response)
                return _verdicts(reply, len(body["query"]))
            except urllib.error.HTTPError as error:
                detail = error.read(500).decode(errors="replace")
                if error.code < 500 or attempt == RETRIES:
                    raise ConnectionError(f"rewards.remote_url {self.url} answers {error.code}: {detail}") from None
            except (urllib.error.URLError, TimeoutError, ConnectionError, json.JSONDecodeError) as error:
                if attempt == RETRIES:
                    reason = getattr(error, "reason", error)
                    raise ConnectionError(f"rewards.remote_url {self.url} cannot be reached: {reason}") from None
            time.sleep(2**attempt)
        raise AssertionError("unreachable")


def _verdicts(reply: dict[str, Any], expected: int) -> list[tuple[Verdict, float]]:
    accuracies = [float(a) for a in reply["acc_rewards"]]
    verdicts: list[Verdict] = reply.get("verdicts") or ["correct" if a > 0 else "wrong" for a in accuracies]
    if len(accuracies) != expected or len(verdicts) != expected:
        raise ValueError(f"the reward server sent {len(accuracies)} rewards for {expected} answers")
    return list(zip(verdicts, accuracies, strict=True))
