"""The reward server, as a process of its own, over real HTTP."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
import uvicorn

from tests.servers import answering
from trainer import config
from trainer.config import ConfigError
from trainer.rewards import remote
from trainer.rewards.connection_guard import GuardedProtocol
from trainer.rewards.grade import ServerAway
from trainer.rewards.remote import BadReplyError
from trainer.rewards.scorer import Scorer
from trainer.rewards.server import ServerLimits, check_host, create_app, response_of
from trainer.system.backoff import Backoff

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "only-for-this-test"
HANG = "\\sum_{a=1}^{4999} " + "(x+\\frac{1}{a})!" * 20 + "x"
"""A thousand million terms."""


def wrap(content: str) -> str:
    return f"<think>t</think><answer>\\boxed{{{content}}}</answer>"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None, token=None, raw=None):
    """(status, parsed reply, headers)."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, headers=headers), timeout=60
        ) as reply:
            text = reply.read().decode()
            status, answer = reply.status, dict(reply.headers)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        status = error.code
        answer = dict(error.headers)
    try:
        return status, json.loads(text), answer
    except json.JSONDecodeError:
        return status, text, answer


def wait_for(url):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return call(f"{url}/health")
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def url():
    port = free_port()
    command = [sys.executable, "-m", "trainer.rewards.server", "--port", str(port), "--deadline-s", "1"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "SPOTRL_REWARD_TOKEN": TOKEN})
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for(base)
        yield base
    finally:
        process.terminate()
        assert process.wait(timeout=20) is not None


@contextmanager
def in_this_process(limits: ServerLimits, deadline_s: float = 3.0):
    port = free_port()
    app = create_app(config.Rewards(deadline_s=deadline_s, workers=1), limits)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", http=GuardedProtocol, ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def test_original_request_with_labels(url):
    body = {
        "query": [f"<|im_start|>assistant\n{wrap('60')}<|im_end|>\n", wrap("(x-1)(x+1)"), "?"],
        "prompts": ["How many?", "Factor", "Else"],
        "labels": ["$\\boxed{60}$", "x^2-1", "A"],
    }
    status, reply, _ = call(f"{url}/get_reward", body, TOKEN)
    assert status == 200
    assert reply == {
        "rewards": [1.5, 1.5, 0.0],
        "scores": [1.0, 1.0, 0.0],
        "format_rewards": [1.0, 1.0, 0.0],
        "acc_rewards": [1.0, 1.0, 0.0],
        "verdicts": ["correct", "correct", "no_answer"],
        "whys": ["", "", ""],
        "extra_logs": {"accuracy": [1.0, 1.0, 0.0], "format": [1.0, 1.0, 0.0]},
    }


def test_same_prompt_with_two_labels_is_graded_by_label(url):
    body = {"query": [wrap("60"), wrap("60")], "prompts": ["same", "same"], "labels": ["60", "61"]}
    assert call(f"{url}/get_reward", body, TOKEN)[1]["acc_rewards"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"query": [wrap("1"), wrap("2")], "prompts": ["p"], "labels": ["1", "2"]}, "1 prompts"),
        ({"query": [wrap("1"), wrap("2")], "prompts": ["p", "q"], "labels": ["1"]}, "1 labels"),
        ({"query": [wrap("1")], "prompts": ["p"]}, "labels"),
        ({"query": [], "prompts": [], "labels": []}, "query"),
        ({"query": wrap("1"), "labels": "1"}, "query"),
        ({"query": [wrap("1")], "labels": ["1"], "answer_types": ["numbr"]}, "numbr"),
        ({"query": [wrap("1")] * 5000, "labels": ["1"] * 5000}, "at most"),
        ([], "object"),
    ],
)
def test_requests_that_do_not_fit_are_422(url, body, says):
    status, reply, _ = call(f"{url}/get_reward", body, TOKEN)
    assert status == 422 and says in json.dumps(reply)


@pytest.mark.parametrize("raw", [b"", b"{", b"\0" * 100, b"\xff\xfe", b'{"query": NaN}'])
def test_bodies_that_are_no_json_are_422(url, raw):
    assert call(f"{url}/get_reward", raw=raw, token=TOKEN)[0] == 422


def test_token_is_asked_for(url):
    body = {"query": [wrap("1")], "labels": ["1"]}
    assert call(f"{url}/get_reward", body)[0] == 401
    assert call(f"{url}/get_reward", body, "wrong")[0] == 401
    assert call(f"{url}/metrics")[0] == 401
    assert call(f"{url}/health")[0] == 200


def test_hanging_answer_costs_its_deadline(url):
    body = {"query": [wrap(HANG), wrap("\\sin x+2")], "labels": ["x", "2+\\sin x"]}
    assert call(f"{url}/get_reward", body, TOKEN)[1]["verdicts"] == ["timeout", "correct"]


def test_metrics_count_answers_and_replies(url):
    call(f"{url}/get_reward", {"query": [wrap("1")], "labels": ["1"]}, TOKEN)
    status, text, _ = call(f"{url}/metrics", token=TOKEN)
    assert status == 200
    assert (
        'reward_answers_total{verdict="correct"}' in text and 'reward_responses_total{status="200"}' in text
    )


def test_client_grades_through_the_server(url, monkeypatch):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, TOKEN)
    texts, references = [wrap(str(i)) for i in range(600)], [str(i - i % 2) for i in range(600)]
    with Scorer(config.Rewards(remote_url=f"{url}/get_reward", accuracy_weight=2.0)) as scorer:
        outcomes = scorer.score(texts, references, ["number"] * 600)
    assert [o.verdict for o in outcomes] == ["correct", "wrong"] * 300
    assert outcomes[0].reward == 2.5


def test_client_without_token_says_so(url, monkeypatch):
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)
    with (
        Scorer(config.Rewards(remote_url=f"{url}/get_reward")) as scorer,
        pytest.raises(ConfigError, match=r"remote_url http.*/get_reward answers 401: .*SPOTRL_REWARD_TOKEN"),
    ):
        scorer.score([wrap("1")], ["1"], ["number"])


def test_client_gives_up_on_a_server_that_stays_away(monkeypatch):
    monkeypatch.setattr(remote, "TRIES", Backoff(attempts=2, first_wait_s=0.01))
    scorer = Scorer(config.Rewards(remote_url=f"http://127.0.0.1:{free_port()}/get_reward"))
    with scorer, pytest.raises(ServerAway, match=r"rewards.remote_url http.* has answered nothing for 0 s"):
        scorer.score([wrap("1")], ["1"], ["number"])


def test_too_large_a_body_is_413():
    with in_this_process(ServerLimits(body_bytes=10_000)) as base:
        status, reply, _ = call(f"{base}/get_reward", {"query": ["a" * 20_000_000], "labels": ["1"]})
        assert status == 413 and "fewer completions" in reply["detail"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "localhost", ""])
def test_addresses_open_to_the_world_are_refused(host):
    with pytest.raises(ConfigError, match="--host"):
        check_host(host, TOKEN)


def test_address_of_the_cluster_needs_a_token():
    check_host("127.0.0.1", "")
    check_host("10.0.0.5", TOKEN)
    with pytest.raises(ConfigError, match="SPOTRL_REWARD_TOKEN"):
        check_host("10.0.0.5", "")


@pytest.mark.parametrize(
    "ends",
    [
        "<|im_end|>\n",
        "<|im_end|><|endoftext|>",
        "<|im_end|>\n" + "<|endoftext|>" * 500,
        "</s>",
        "<|eot_id|>",
        "<eos><pad><pad>",
        "<｜end▁of▁sentence｜>",
        "<|end_of_text|>",
        "[PAD][PAD]",
        "<end_of_turn>\n",
        "<|im_end|></s>\n\n",
        "",
    ],
)
def test_special_tokens_around_a_completion_are_off(ends):
    for start in (
        "",
        "<|im_start|>assistant\nold<|im_end|>\n<|im_start|>assistant\n",
        "<s>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ):
        assert response_of(start + wrap("5") + ends) == wrap("5")
    assert response_of("plain </think> text") == "plain </think> text"


def test_what_is_wrong_with_one_row_costs_that_row(url):
    raw = (
        b'{"query": ["Q", null, "\\ud800 Q", "Q", 7, "Q", "Q"], "labels": ["1", "1", "1", null, "1", 1, {"a":'
        b" [1]}]}"
    )
    raw = raw.replace(b"Q", json.dumps(wrap("1")).encode()[1:-1])
    status, reply, _ = call(f"{url}/get_reward", raw=raw, token=TOKEN)
    assert status == 200
    assert reply["verdicts"] == ["correct", "no_answer", "correct", "error", "no_answer", "correct", "error"]


def test_half_a_surrogate_pair_reaches_the_processes_unharmed(url):
    raw = json.dumps(
        {"query": [wrap("x + \ud800"), wrap("1+\\sin x")], "labels": ["\\sin x + 1"] * 2}
    ).encode()
    assert call(f"{url}/get_reward", raw=raw, token=TOKEN)[1]["verdicts"] == ["wrong", "correct"]


def test_prompts_bring_the_nouns_of_units(url):
    body = {
        "query": [wrap("5 apples")] * 2,
        "labels": ["5"] * 2,
        "prompts": ["How many apples?", "How many oranges?"],
    }
    assert call(f"{url}/get_reward", body, TOKEN)[1]["verdicts"] == ["correct", "wrong"]


def test_token_in_the_url_serves_clients_without_headers(url):
    """OpenRLHF's client sends the body alone, and reads `rewards`, `scores` and `extra_logs`."""
    body = {"query": [wrap("1")], "prompts": ["p"], "labels": ["1"]}
    status, reply, _ = call(f"{url}/get_reward?token={TOKEN}", body)
    assert status == 200 and reply["scores"] == [1.0] and len(reply["extra_logs"]["format"]) == 1
    assert call(f"{url}/get_reward?token=wrong", body)[0] == 401
    assert call(f"{url}/get_reward?token=%ff", body)[0] == 401


@contextmanager
def server_that_says(reply: bytes):
    with answering(lambda _: (200, reply, {})) as url:
        yield f"{url}/get_reward?model=secret"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b'{"rewards": ["1"]}', "must be a number"),
        (b'{"acc_rewards": [1.0], "verdicts": ["splendid"]}', "splendid"),
        (b'{"rewards": [1.0, 1.0]}', "list of 1"),
        (b'{"rewards": 1.0}', "list of 1"),
        (b"[1.0]", "object"),
        (b"{}", "neither"),
        (b'{"rewards": [null]}', "must be a number"),
    ],
)
def test_client_refuses_replies_that_make_no_rewards(reply, says):
    with server_that_says(reply) as url, Scorer(config.Rewards(remote_url=url)) as scorer:
        with pytest.raises(BadReplyError, match=says) as error:
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
def test_client_understands_replies_in_openrlhf_s_shape(reply, accuracy):
    with server_that_says(reply) as url, Scorer(config.Rewards(remote_url=url)) as scorer:
        (outcome,) = scorer.score([wrap("1")], ["1"], ["number"])
    assert outcome.accuracy == accuracy and outcome.verdict == ("correct" if accuracy > 0 else "wrong")


@pytest.mark.slow
def test_simple_completions_do_not_wait_for_hanging_ones(url):
    hang = {"query": [wrap(HANG + f"+ {i}") for i in range(4)], "labels": ["x"] * 4}
    threads = [threading.Thread(target=call, args=(f"{url}/get_reward", hang, TOKEN)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    started = time.monotonic()
    body = {"query": [wrap("60"), wrap("B")], "labels": ["60", "B"]}
    assert call(f"{url}/get_reward", body, TOKEN)[1]["verdicts"] == ["correct"] * 2
    assert time.monotonic() - started < 2.0
    assert any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(timeout=120)


def test_a_kept_connection_serves_many_requests(url):
    connection = HTTPConnection(url.removeprefix("http://"))
    body = json.dumps({"query": [wrap("1")], "labels": ["1"]}).encode()
    for _ in range(20):
        connection.request("POST", "/get_reward", body, {"Authorization": f"Bearer {TOKEN}"})
        assert json.load(connection.getresponse())["verdicts"] == ["correct"]
    connection.close()
