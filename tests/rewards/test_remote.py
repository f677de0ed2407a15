"""The client of a reward server, over real HTTP to small servers on loopback."""

from __future__ import annotations

import email.utils
import json
import time
import urllib.error
from email.message import Message

import pytest

from tests.servers import Reply, Request, answering, free_port
from trainer import config
from trainer.config import ConfigError
from trainer.rewards import remote
from trainer.rewards.completion_facts import sample_completion as wrap
from trainer.rewards.grade import ServerAway
from trainer.rewards.judge import Judge
from trainer.rewards.remote import BadReplyError
from trainer.rewards.scorer import Scorer
from trainer.system.backoff import Backoff, retry_after_s


def graded_by_label(request: Request) -> Reply:
    """A server that wants a token and compares the box with the label."""
    if request.headers["Authorization"] != "Bearer only-for-this-test":
        return 401, b"send the token", {}
    asked = json.loads(request.body)
    scores = []
    for query, label in zip(asked["query"], asked["labels"], strict=True):
        scores.append(float(query == wrap(label)))
    return 200, json.dumps({"rewards": [9.0] * len(scores), "scores": scores}).encode(), {}


def test_completions_are_graded_in_order_with_the_token(monkeypatch):
    texts, references = [wrap(str(i)) for i in range(600)], [str(i - i % 2) for i in range(600)]
    with answering(graded_by_label) as url:
        monkeypatch.setenv(remote.TOKEN_VARIABLE, "only-for-this-test")
        with Scorer(config.Rewards(remote_url=f"{url}/get_reward", accuracy_weight=2.0)) as scorer:
            outcomes = scorer.score(texts, references, ["number"] * 600)
            assert [o.verdict for o in outcomes] == ["correct", "wrong"] * 300
            assert outcomes[0].reward == 2.5
            monkeypatch.delenv(remote.TOKEN_VARIABLE)
            with pytest.raises(
                ConfigError, match=r"remote_url http.*/get_reward answers 401: send the token"
            ):
                scorer.score([wrap("1")], ["1"], ["number"])


def test_client_gives_up_on_a_server_that_stays_away(monkeypatch):
    monkeypatch.setattr(remote, "TRIES", Backoff(attempts=2, first_wait_s=0.01))
    scorer = Scorer(config.Rewards(remote_url=f"http://127.0.0.1:{free_port()}/get_reward"))
    with scorer, pytest.raises(ServerAway, match=r"rewards.remote_url http.* has answered nothing for 0 s"):
        scorer.score([wrap("1")], ["1"], ["number"])


@pytest.mark.parametrize(("reply", "says"), [
    (b'{"rewards": ["1"]}', "must be a number"), (b'{"rewards": [1.0, 1.0]}', "list of 1"),
    (b'{"rewards": 1.0}', "list of 1"), (b"[1.0]", "object"), (b"{}", "neither"),
    (b'{"rewards": [null]}', "must be a number"), (b"[" * 100_000, "no JSON"),
])  # fmt: skip
def test_replies_that_make_no_rewards_are_refused(reply, says):
    with answering(lambda _: (200, reply, {})) as url:
        settings = config.Rewards(remote_url=f"{url}/get_reward?model=secret")
        with Scorer(settings) as scorer, pytest.raises(BadReplyError, match=says) as error:
            scorer.score([wrap("1")], ["1"], ["number"])
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("reply", "accuracy"),
    [
        (b'{"rewards": [0.5]}', 0.5),
        (b'{"rewards": [9.0], "scores": [1], "extra_logs": {"length": [3]}}', 1.0),
        (b'{"rewards": [-1.0]}', -1.0),
    ],
)
def test_replies_in_openrlhf_s_shape_are_understood(reply, accuracy):
    with (
        answering(lambda _: (200, reply, {})) as url,
        Scorer(config.Rewards(remote_url=f"{url}/get_reward")) as scorer,
    ):
        (outcome,) = scorer.score([wrap("1")], ["1"], ["number"])
    assert outcome.accuracy == accuracy and outcome.verdict == ("correct" if accuracy > 0 else "wrong")


def http_error(code: int, after: str | None) -> urllib.error.HTTPError:
    headers = Message()
    if after is not None:
        headers["Retry-After"] = after
    return urllib.error.HTTPError("http://x", code, "busy", headers, None)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (http_error(503, "7"), 7.0),
        (http_error(429, " 0 "), 0.0),
        (http_error(503, None), None),
        (http_error(503, "soon"), None),
        (http_error(500, "7"), None),
        (OSError(), None),
    ],
)
def test_what_a_busy_server_asks_for(error, seconds):
    assert retry_after_s(error) == seconds


def test_a_date_is_understood():
    at = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < (retry_after_s(http_error(503, at)) or 0) < 31


def test_a_server_that_says_when_is_asked_then():
    def count(after: str) -> int:
        calls = []

        def busy() -> None:
            calls.append(1)
            raise http_error(503, after)

        with pytest.raises(urllib.error.HTTPError):
            Backoff(attempts=2, first_wait_s=0.001, patience_s=0.3).call(busy, lambda _: True)
        return len(calls)

    assert count("1") == 2  # longer than its patience
    assert count("0") > 2


def test_a_server_that_is_away_is_asked_for_as_long_as_the_patience_lasts():
    began = time.monotonic()
    calls = []

    def away() -> None:
        calls.append(1)
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        Backoff(attempts=2, first_wait_s=0.02, max_wait_s=0.1, patience_s=0.4).call(away, lambda _: True)
    assert len(calls) > 3 and 0.4 <= time.monotonic() - began < 2


@pytest.mark.parametrize("kind", ["judge", "reward server"])
def test_a_server_that_is_busy_is_waited_for_and_costs_no_request(kind):
    """A provider's limit of the rate: 429 with Retry-After."""
    replies = [429] * 6

    def answer(_: Request) -> Reply:
        said = {"rewards": [1.0], "choices": [{"message": {"content": "CORRECT"}}]}
        return replies.pop() if replies else 200, json.dumps(said).encode(), {"Retry-After": "0"}

    with answering(answer) as address:
        if kind == "judge":
            judge = Judge(config.Rewards(judge_url=f"{address}/v1", judge_model="m", judge_requests=1))
            (grade,) = judge.grades([("a", "b", "c")])
            assert judge.requests == 1
        else:
            client = remote.RewardClient(config.Rewards(remote_url=f"{address}/get_reward"))
            (grade,) = client.grade(["a"], ["b"], ["text"], [""])
        assert grade.verdict == "correct" and not replies
