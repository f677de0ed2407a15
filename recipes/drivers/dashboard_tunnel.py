"""`dashboard`: a tunnel from the desk to Ray's dashboard and jobs interface on a run's head, and the token
for it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import urllib.parse
from contextlib import suppress

from recipes.platforms import programs
from recipes.platforms.targets import target_named
from recipes.records import run_record
from trainer.config import ConfigError
from trainer.config.run_folder import write_whole

PUBLISHED = ".cache/spotrl/{run_id}.json"
"""Under the home directory of the head (trainer/node/launch/ray_node.py): address and token."""
PORT = 8265


def open_tunnel(run: str, dry_run: bool = False) -> int:
    """Reads address and token from the head, then holds the tunnel until Ctrl-C. Raises ConfigError."""
    record = run_record.load_record(run)
    platform = target_named(record.target)
    read = platform.read_from_head(record, PUBLISHED.format(run_id=run), dry_run)
    if dry_run:
        print(shlex.join(read))
        return 0
    done = subprocess.run(read, capture_output=True, text=True)
    if done.returncode:
        complaint = programs.last_line(done.stderr, "no answer")
        if "No such file" in complaint:
            complaint = "it has not begun, or has ended"
        raise ConfigError(f"no dashboard of {run} ({complaint}): {platform.cure_of_silence(record)}")
    published = json.loads(done.stdout)
    port = free_port()
    tunnel = platform.tunnel(record, port, urllib.parse.urlsplit(published["url"]))
    address = f"http://127.0.0.1:{port}" if tunnel else published["url"]
    token = (run_record.RUNS / run / "ray.token").absolute()
    write_whole(token, published["token"].encode(), private=True)
    print(
        f"dashboard: {address} (it asks for the token in {token})\n"
        f"jobs: export RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}\n"
        "      ray job list; ray job logs -f ID; ray job stop ID; ray job submit -- COMMAND\n"
        "Ctrl-C closes the tunnel; the run goes on",
        flush=True,
    )
    try:
        return subprocess.run(tunnel).returncode if tunnel else 0
    except KeyboardInterrupt:
        return 0


def free_port() -> int:
    """8265, or a free port where that is taken."""
    for port in (PORT, 0):
        with socket.socket() as s, suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return s.getsockname()[1]
    raise AssertionError("port 0 is always free")
