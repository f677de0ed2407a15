"""Connections that send half of a request, to the reward server over real sockets."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.rewards.test_server import ROOT, call, free_port, in_this_process, wait_for, wrap
from trainer.rewards import connection_guard
from trainer.rewards.server import ServerLimits


def open_halves(port: int, count: int) -> list[socket.socket]:
    """Connections of which every other one sends half of a head."""
    halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for half in halves[::2]:
        with suppress(ConnectionError):  # dropped already, to make room
            half.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\n")
    return halves


@pytest.mark.slow
def test_three_thousand_half_open_requests_neither_stay_nor_block(monkeypatch):
    monkeypatch.setattr(connection_guard, "HEAD_TIMEOUT_S", 4.0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with in_this_process(ServerLimits(body_timeout_s=2.0)) as base, ExitStack() as closing:
        port = int(base.rpartition(":")[2])
        halves = [closing.enter_context(half) for half in open_halves(port, 3000)]
        started = time.monotonic()
        assert call(f"{base}/get_reward", {"query": [wrap("1")], "labels": ["1"]})[1]["verdicts"] == [
            "correct"
        ]
        assert time.monotonic() - started < 3.0
        connections = [c for c in psutil.Process().net_connections("tcp") if c.laddr and c.laddr.port == port]
        assert sum(c.status == "ESTABLISHED" for c in connections) <= connection_guard.MAX_CONNECTIONS + 1
        for half in halves:  # dropped, every one
            half.settimeout(20)
            with suppress(ConnectionError):
                assert half.recv(1) == b""
        slow = closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        slow.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        slow.settimeout(10)
        assert b" 408 " in slow.recv(1000)


def test_half_open_requests_do_not_block_a_server_that_may_open_few_files():
    port = free_port()
    command = f"ulimit -n 200; exec {sys.executable} -m trainer.rewards.server --port {port}"
    base = f"http://127.0.0.1:{port}"
    with subprocess.Popen(["bash", "-c", command], cwd=ROOT) as server, ExitStack() as closing:
        try:
            wait_for(base)
            for half in open_halves(port, 300):
                closing.enter_context(half)
            started = time.monotonic()
            assert call(f"{base}/health")[0] == 200
            assert time.monotonic() - started < 5.0
        finally:
            server.terminate()
