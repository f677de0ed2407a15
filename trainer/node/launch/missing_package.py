"""What a node does whose Python lacks a package that the launcher needs: the head hears of it, and all nodes
leave with its verdict. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from trainer.node import topology
from trainer.node.launch import rendezvous
from trainer.system.errors import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG


def leave_for_missing_package(error: ImportError, arguments: list[str]) -> NoReturn:
    """Ends this process after the other nodes have heard why."""
    why = f"{error}: run trainer/shell/setup.sh of the same commit there"
    print(f"error: {why}", file=sys.stderr, flush=True)
    code = EXIT_CONFIG
    with contextlib.suppress(ConfigError, OSError, ValueError, rendezvous.LaunchEnded):
        node = topology.read_node_environment(os.environ)
        port = int(os.environ.get("SPOTRL_PORT", rendezvous.PORT))
        start = topology.start_names(os.environ)
        run = run_id(Path(arguments[arguments.index("--config") + 1]).read_text())
        if node.nodes > 1 and node.is_head:
            _tell_all(rendezvous.RendezvousHead(node.nodes, run, port, start=start), code)
        elif node.nodes > 1:
            hello = {"rank": node.rank, "nodes": node.nodes, "run": run, "start": start}
            code, _ = rendezvous.report_failure(
                node.head, hello | {"host": socket.gethostname()}, code, why, port
            )
    sys.exit(code)


def run_id(text: str) -> str:
    """The run's id in a resolved configuration, without a YAML reader."""
    section = re.search(r"^run:\n((?:[ ]+.*\n?)*)", text, re.MULTILINE)
    named: dict[str, str] = {}
    for key, value in re.findall(r"^\s+(id|name):\s*(.+?)\s*$", section[1] if section else "", re.MULTILINE):
        named[key] = value.strip("'\"")
    return named.get("id") or named.get("name") or "run"


def _tell_all(head: rendezvous.RendezvousHead, code: int) -> None:
    """Waits for the other nodes, and sends them the code."""
    deadline = time.monotonic() + rendezvous.REPORT_S
    while head.missing() and time.monotonic() < deadline:
        with contextlib.suppress(rendezvous.LaunchEnded):
            head.accept(0.5)
    head.send({"kind": "end", "code": code})
    time.sleep(rendezvous.HEARTBEAT_S)
    head.close()
