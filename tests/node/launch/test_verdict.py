"""One verdict of the head for all nodes: what it makes of first messages, and how a node that cannot join
hears it. Whole faults on four hosts: tests/lab/test_preflight.py."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.node.launch import rendezvous
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT


@pytest.mark.parametrize(("others", "code"), [(True, EXIT_PREFLIGHT), (False, EXIT_CONFIG)])
def test_a_node_whose_short_message_comes_alone_is_behind_a_path_that_drops_long_ones(
    monkeypatch, others, code
):
    """Another machine helps where other nodes came through."""
    monkeypatch.setattr(rendezvous, "WHOLE_S", 0.3)
    head = rendezvous.RendezvousHead(3, "run", port=0)
    if others:
        hello = {"rank": 1, "nodes": 3, "run": "run", "host": "gpu1"}
        rendezvous.join_head("127.0.0.1", hello, 5.0, head.port)
        assert head.accept(5.0) == 1
    with socket.create_connection(("127.0.0.1", head.port)) as node:
        node.sendall(json.dumps({"kind": "here", "run": "run", "rank": 2}).encode() + b"\n")
        with pytest.raises(rendezvous.LaunchEnded, match="short packets arrive and long ones do not") as end:
            head.accept(5.0)
        assert end.value.code == code
        head.send({"kind": "end", "code": end.value.code})
        assert f'"code": {code}'.encode() in node.makefile("rb").readline()
    head.close()


@pytest.mark.parametrize(("given", "code"), [(EXIT_PREFLIGHT, EXIT_PREFLIGHT), (1, EXIT_CONFIG)])
def test_a_node_that_cannot_take_part_is_named_and_leaves_with_the_heads_code(given, code):
    head = rendezvous.RendezvousHead(2, "run", port=0)
    hello = {"rank": 1, "nodes": 2, "run": "run", "host": "gpu1"}
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(rendezvous.report_failure, "127.0.0.1", hello, given, "it lacks psutil", head.port)
        with pytest.raises(rendezvous.LaunchEnded, match="gpu1.*it lacks psutil") as end:
            head.accept(5.0)
        assert end.value.code == code
        head.send({"kind": "end", "code": end.value.code})
        assert left.result() == (code, "it lacks psutil")
    head.close()


def test_a_second_head_is_told_so():
    head = rendezvous.RendezvousHead(2, "run", port=0)

    def tell() -> None:
        with socket.create_connection(("127.0.0.1", head.port)) as other:
            order = {"kind": "verdict", "run": "run", "code": EXIT_CONFIG, "why": "two heads"}
            other.sendall(json.dumps(order).encode() + b"\n")
            other.recv(100)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(rendezvous.LaunchEnded, match="two heads") as end:
        head.accept(5.0)
    assert end.value.code == EXIT_CONFIG
    head.close()


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("method: grpo\nrun:\n  name: mine\n  id: ''\n  seed: 0\nmodel:\n  name: x\n", "mine"),
        ("run:\n  name: mine\n  id: launch-7\n", "launch-7"),
        ("method: grpo\n", "run"),
    ],
)
def test_the_runs_id_is_read_without_yaml(text, run):
    assert rendezvous.run_id_of(text) == run
