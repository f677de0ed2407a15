"""The reward server's queue is bounded by memory, and clients that find it full come back when it says."""

import email.utils
import json
import socket
import sys
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from email.message import Message

import pytest

from tests.rewards.test_server import HANG, TOKEN, call, in_this_process, url, wrap  # noqa: F401
from tests.servers import Reply, Request, answering
from trainer import config
from trainer.rewards.byte_queue import ByteQueue, QueueFull
from trainer.rewards.grade import Grade
from trainer.rewards.judge import Judge
from trainer.rewards.remote import RewardClient
from trainer.rewards.server import COMPLETION_BYTES, ServerLimits
from trainer.system.backoff import Backoff, retry_after_s

ONE = {"query": [wrap("1")], "labels": ["1"]}


def held_bytes(base: str) -> int:
    """What the server says that its queue holds."""
    return int(call(f"{base}/metrics")[1].partition("\nreward_queue_bytes ")[2].partition("\n")[0])


def test_five_hundred_clients_at_once_are_graded_and_none_is_sent_away(url):  # noqa: F811
    """Each has one expression, so that all wait until the graders have started."""
    texts = [wrap("2 + \\sin x"), *[wrap(str(i)) for i in range(1, 64)]]
    body = {"query": texts, "labels": ["\\sin x + 2", *[str(i - i % 2) for i in range(1, 64)]]}
    data = json.dumps(body).encode()
    head = f"POST /get_reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    with ExitStack() as closing:
        clients = []
        for _ in range(500):
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            clients.append(closing.enter_context(socket.create_connection(address)))
        began = time.monotonic()
        for client in clients:
            client.sendall(head.encode() + data)
        replies = [client.makefile("rb").read() for client in clients]
    print(f"{500 * 64 / (time.monotonic() - began):.0f} verdicts/s", file=sys.stderr)
    statuses = Counter(reply.split()[1] for reply in replies)
    assert statuses == {b"200": 500}
    verdicts = [json.loads(reply.partition(b"\r\n\r\n")[2])["verdicts"] for reply in replies]
    assert verdicts == [["correct", "wrong"] * 32] * 500


def test_a_full_queue_says_when_to_return_and_every_client_does():
    """24 clients of 64 completions each, before a queue that has room for two of them."""
    texts = [wrap(f"\\sin x + {i}") for i in range(64)]
    references = [f"{i - i % 2}+\\sin x" for i in range(64)]
    with in_this_process(ServerLimits(queue_bytes=2 * 64 * (COMPLETION_BYTES + 500))) as base:
        clients = [RewardClient(config.Rewards(remote_url=f"{base}/get_reward")) for _ in range(24)]

        def grade(client: RewardClient) -> list:
            return client.grade(texts, references, ["math"] * 64, [""] * 64)

        with ThreadPoolExecutor(24) as threads:
            graded = list(threads.map(grade, clients))
        assert graded == [[Grade("correct", 1.0), Grade("wrong", 0.0)] * 32] * 24
        assert sum(client.busy for client in clients) > 0
        metrics = call(f"{base}/metrics")[1]
        assert 'reward_responses_total{status="503"}' in metrics and "reward_queue_bytes 0\n" in metrics


def test_a_full_queue_reads_a_request_to_its_end_and_holds_none_of_it():
    """A reply in the middle of a body would be a reset to the client, and no reason."""
    hang = {"query": [wrap(HANG)] * 2, "labels": ["x"] * 2}
    with (
        in_this_process(ServerLimits(queue_bytes=20_000), deadline_s=1.0) as base,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(call, f"{base}/get_reward", hang)
        time.sleep(0.5)
        status, _, headers = call(f"{base}/get_reward", {"query": ["a" * 20_000_000], "labels": ["1"]})
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert 0 < held_bytes(base) <= 20_000
        assert call(f"{base}/health")[0] == 200
        assert first.result()[0] == 200
        assert call(f"{base}/get_reward", ONE)[0] == 200


def test_bodies_being_read_are_capped_together():
    with in_this_process(ServerLimits(body_bytes=1 << 20, queue_bytes=3 << 19, body_timeout_s=5)) as base:
        port = int(base.rpartition(":")[2])
        head = b"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for s in held:
            s.sendall(head + b" " * 999_000)
            s.settimeout(2)
        time.sleep(0.5)
        assert held_bytes(base) <= 3 << 19
        replies = []
        for s in held:
            s.sendall(b" " * 1000)
            with suppress(TimeoutError):
                replies.append(s.recv(100))
        assert sum(b" 503 " in reply for reply in replies) >= 2
        assert call(f"{base}/health")[0] == 200
        for s in held:
            s.close()


def test_what_a_client_that_left_had_sent_is_not_graded():
    """200 completions of which each takes its whole deadline, from a client that was killed."""
    body = json.dumps({"query": [wrap(f"{HANG}+{i}") for i in range(200)], "labels": ["x"] * 200}).encode()
    with in_this_process(ServerLimits(), deadline_s=1.0) as base:
        with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as gone:
            head = f"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            gone.sendall(head.encode() + body)
            time.sleep(2.0)
        began = time.monotonic()
        after = {"query": [wrap("2+\\sin x")], "labels": ["\\sin x+2"]}
        assert call(f"{base}/get_reward", after)[1]["verdicts"] == ["correct"]
        assert time.monotonic() - began < 20
        metrics = call(f"{base}/metrics")[1]
        assert "reward_clients_left_total 1\n" in metrics and "reward_queue_bytes 0\n" in metrics


def test_the_seconds_follow_the_pace_of_the_queue(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    queue = ByteQueue(100)
    queue.take(1000)  # an empty queue takes anything
    with pytest.raises(QueueFull) as nothing_known:
        queue.take(1)
    assert nothing_known.value.retry_after_s == 1
    for _ in range(10):
        now[0] += 1.0
        queue.give(20, finished=True)
    assert queue.held_bytes == 800 and queue.retry_after_s() == 18  # 200 in 9 s: 36 s for all
    now[0] += 61
    assert queue.retry_after_s() == 1


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


def test_a_judge_that_is_busy_is_waited_for_and_costs_no_request():
    """A provider's limit of the rate: 429 with Retry-After."""
    replies = [429] * 6

    def answer(_: Request) -> Reply:
        body = json.dumps({"choices": [{"message": {"content": "CORRECT"}}]}).encode()
        return replies.pop() if replies else 200, body, {"Retry-After": "0"}

    with answering(answer) as address:
        judge = Judge(config.Rewards(judge_url=f"{address}/v1", judge_model="m", judge_requests=1))
        assert judge.grades([("a", "b", "c")])[0].verdict == "correct"
        assert judge.requests == 1
