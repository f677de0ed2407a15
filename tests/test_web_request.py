"""Requests to servers on loopback that redirect, drip, send without end, or stand behind a proxy."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainer.config import ConfigError, Rewards
from trainer.node.launch import ray_node
from trainer.node.launch.ray_node import Ports, RayNode
from trainer.node.watch.preemption import FLAG_VARIABLE, MetadataServer, PreemptionNotice
from trainer.rewards import judge, remote
from trainer.rewards.scorer import Scorer
from trainer.sampling import serve
from trainer.system.web_request import ReplyUnfinished, is_local, send_request

ROOT = Path(__file__).parents[1]


class Place:
    """A server that answers every request with one reply, and keeps what it was sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.code = 200
        self.headers: dict[str, str] = {}
        self.pieces = [b"{}"]
        self.wait_s = 0.0
        """Wait between two pieces."""
        place = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                place.seen.append((self.command, self.path, dict(self.headers)))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(place.code)
                for name, value in place.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for piece in place.pieces:
                        self.wfile.write(piece)
                        self.wfile.flush()
                        time.sleep(place.wait_s)
                except OSError:
                    pass

            do_POST = do_PUT = do_CONNECT = do_GET

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def redirect(self, code: int, url: str) -> None:
        self.code = code
        self.headers = {"Location": url}
        self.pieces = [b"moved"]

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def places():
    made = Place(), Place()
    yield made
    for one in made:
        one.end()


@pytest.fixture
def place(places):
    return places[0]


@pytest.fixture
def stranger(places):
    return places[1]


@pytest.fixture
def bad_proxy(monkeypatch, stranger):
    """Everything that takes a proxy goes to a stranger, who says 403."""
    stranger.code = 403
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, stranger.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return stranger


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_key_goes_to_its_judge_or_reward_server_alone(monkeypatch, place, stranger, code):
    for variable in (judge.KEY_VARIABLE, remote.TOKEN_VARIABLE):
        monkeypatch.setenv(variable, "secret")
    place.redirect(code, f"{stranger.url}/v1/chat/completions")
    settings = Rewards(judge_url=f"{place.url}/v1", judge_model="m")
    with Scorer(settings) as scorer, pytest.raises(ConfigError, match=rf"answers {code}: a redirect to http"):
        scorer.score(["<answer>$\\boxed{a feline}$</answer>"], ["cat"], ["text"])
    place.redirect(code, f"{stranger.url}/get_reward?token=x")
    client = remote.RewardClient(Rewards(remote_url=f"{place.url}/get_reward"))
    with pytest.raises(ConfigError, match=rf"answers {code}: a redirect to http.*/get_reward, which is not"):
        client.grade(["x"], ["1"], ["number"], [""])
    assert not stranger.seen


def test_redirects_that_are_followed_take_no_credential_to_another_host(place, stranger):
    place.redirect(307, f"{stranger.url}/there")
    stranger.pieces = [b"found"]
    sent = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Api-Key": "k", "Accept": "text/plain"}
    assert send_request(place.url, headers=sent, redirects=2) == b"found"
    (_, path, headers) = stranger.seen[0]
    assert path == "/there" and headers["Accept"] == "text/plain"
    assert not {"Authorization", "Cookie", "X-Api-Key"} & headers.keys()


def test_redirects_end_and_stay_with_http(place):
    place.redirect(302, f"{place.url}/again")
    with pytest.raises(urllib.error.HTTPError, match="redirect"):
        send_request(place.url, redirects=3)
    assert len(place.seen) == 4
    for address in ("file:///etc/hostname", "ftp://127.0.0.1/x"):
        place.redirect(302, address)
        with pytest.raises(ConfigError, match="is no address"):
            send_request(place.url, redirects=3)


@pytest.mark.parametrize("address", ["file:///etc/hostname", "127.0.0.1", "http://", "http://a b/", "data:,x",
                                     "http://[::1", "http://h:99999/", "http://h/\r\nX: y", ""])  # fmt: skip
def test_what_is_no_address_of_http(address):
    with pytest.raises(ConfigError, match="is no address"):
        send_request(address)


def test_a_reply_ends_in_its_time_however_it_drips(place):
    place.pieces = [b"x"] * 200
    place.wait_s = 0.05
    began = time.monotonic()
    with pytest.raises(ReplyUnfinished):
        send_request(place.url, timeout_s=0.4)
    assert time.monotonic() - began < 3.0
    place.code, began = 500, time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as raised:
        send_request(place.url, timeout_s=0.4)
    assert raised.value.code == 500 and time.monotonic() - began < 3.0


def test_headers_that_drip_end_in_their_time():
    """Each byte comes well before a socket's own clock ends."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(200):
                connection.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass

    threading.Thread(target=drip, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        send_request(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=0.4)
    assert time.monotonic() - began < 3.0
    listener.close()


def test_a_reply_is_as_long_as_it_may_be_and_whole(place):
    place.pieces = [b"x" * 1000]
    assert len(send_request(place.url, most_bytes=1000)) == 1000
    with pytest.raises(ReplyUnfinished, match="more than"):
        send_request(place.url, most_bytes=999)
    place.headers = {"Content-Length": "1001"}
    with pytest.raises(OSError, match="IncompleteRead"):
        send_request(place.url)


def test_an_error_brings_the_beginning_of_its_body(place):
    place.code = 422
    place.pieces = [b"no such row", b"y" * 100_000]
    with pytest.raises(urllib.error.HTTPError) as raised:
        send_request(place.url)
    body = raised.value.read()
    assert body.startswith(b"no such row") and len(body) <= 4096


LOCAL = "localhost 127.0.0.1 127.9.9.9 [::1] 169.254.169.254 [fd00:ec2::254] a.localhost 0.0.0.0"


OTHERS = "example.com 10.0.0.5 localhost.example.com [2001:db8::1]"


@pytest.mark.parametrize("hosts, local", [(f"{LOCAL} metadata.google.internal", True), (OTHERS, False)])
def test_no_proxy_reaches_this_machine_and_metadata_alone(hosts, local):
    for host in hosts.split():
        assert is_local(f"http://{host}:80/x") is local, host


def test_other_hosts_are_asked_through_the_proxy(bad_proxy):
    bad_proxy.code = 200
    assert send_request("http://model.invalid/x") == b"{}"
    assert bad_proxy.seen[0][1] == "http://model.invalid/x"
    with pytest.raises(OSError):
        send_request("http://model.invalid/x", direct=True)
    assert len(bad_proxy.seen) == 1


def test_this_machine_is_asked_without_a_proxy(bad_proxy, place, monkeypatch):
    assert serve.server_answers(place.server.server_port)
    ports = Ports(dashboard=place.server.server_port)
    ray = RayNode(address="127.0.0.1", ports=ports, cpus=1, gpus=0, env={})
    ray.dashboard_host = "127.0.0.1"
    # A node that closes ends every descendant of its process, which here has those of other tests.
    monkeypatch.setattr(ray_node, "end_descendants", lambda grace_s: 0)
    assert ray.request("GET", "/api/version") == {}
    ray.close(keep_logs=False)
    place.pieces = [b'{"rewards": [1.0]}']
    client = remote.RewardClient(Rewards(remote_url=f"{place.url}/get_reward"))
    assert client.grade(["x"], ["1"], ["number"], [""])[0].verdict == "correct"
    assert not bad_proxy.seen


def test_notices_come_through_whatever_the_proxies_are(bad_proxy, place):
    place.pieces = [b"TRUE"]
    assert MetadataServer("gcp", place.url).ask() == "gcp: instance preempted"
    assert not bad_proxy.seen


@pytest.mark.parametrize("code", [403, 405])
def test_a_metadata_service_that_refuses_is_no_no(place, code, tmp_path, capsys):
    place.code = code
    for kind in ("gcp", "aws"):
        with pytest.raises(urllib.error.HTTPError):
            MetadataServer(kind, place.url).ask()
    env = {"GCE_METADATA_HOST": place.url.removeprefix("http://"), FLAG_VARIABLE: str(tmp_path / "flag")}
    notice = PreemptionNotice(signals=False, poll_s=0.01, env=env)
    deadline = time.monotonic() + 20
    told = ""
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
        told = capsys.readouterr().err
    notice.close()
    assert f"metadata service answers {code}" in told and told.count("\n") == 1
    assert notice.reason is None


def test_nothing_asks_in_another_way():
    """What opens an address by itself follows redirects with its key, takes proxies for loopback, and waits
    for as long as a server likes."""
    other_ways = re.compile(
        r"\burlopen\(|\bbuild_opener\(|\bHTTPS?Connection\(|^\s*(import|from) (requests|aiohttp|httpx)\b"
    )
    rooms = [ROOT / room for room in ("trainer", "recipes", "data_prep", "examples")]
    paths = [ROOT / "launch.py"] + [path for room in rooms for path in sorted(room.rglob("*.py"))]
    found = []
    for path in paths:
        if path.name == "web_request.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if other_ways.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found, "ask by trainer.system.web_request: " + ", ".join(found)
