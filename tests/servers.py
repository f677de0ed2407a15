"""Real servers on loopback for the tests: `rclone serve s3`, moto's S3, a TCP proxy that can be cut and
slowed, and an HTTP server that answers as a test says.

Every one is a context manager and ends its own process by pid.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

KEY, SECRET = "AKIASPOTRLTEST000000", "a-secret-for-the-loopback-server"


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, process: subprocess.Popen | None = None, timeout_s: float = 30.0) -> None:
    """Waits until something listens. Raises RuntimeError if the process ends, or after the timeout."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port} after {timeout_s:.0f} s")


def s3_environment(port: int, secret: str = SECRET) -> dict[str, str]:
    """What SkyPilot would set for an S3 store, for a server on loopback."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }


class S3Server:
    """An S3 server in its own process, which can be killed and started again on the same port and files."""

    def __init__(self, command: list[str], port: int):
        self.command, self.port = command, port
        self.env = s3_environment(port)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port, self.process)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)
            self.process.wait()
        self.process = None


@contextlib.contextmanager
def rclone(folder: Path, buckets: tuple[str, ...] = ("bucket",)) -> Generator[S3Server]:
    """`rclone serve s3` on `folder`: bytes, authentication, disk; every sub-folder is a bucket."""
    binary = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    for bucket in buckets:
        (folder / bucket).mkdir(parents=True, exist_ok=True)
    port = free_port()
    options = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
    server = S3Server([binary, "serve", "s3", str(folder), *options], port)
    server.start()
    try:
        yield server
    finally:
        server.kill(signal.SIGTERM)


@contextlib.contextmanager
def moto(buckets: tuple[str, ...] = ("bucket",)) -> Generator[S3Server]:
    """moto's S3 server: ranges, conditional writes, ETags, multipart listings. It checks no credentials."""
    import boto3

    port = free_port()
    server = S3Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    server.start()
    try:
        client = boto3.client(
            "s3",
            endpoint_url=server.env["AWS_ENDPOINT_URL"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
        yield server
    finally:
        server.kill(signal.SIGTERM)


@dataclass(frozen=True)
class Request:
    """What a client has sent."""

    method: str
    path: str
    headers: Message
    body: bytes


Reply = tuple[int, bytes | Iterable[bytes], Mapping[str, str]]
"""Status, body and headers. A body in pieces needs its Content-Length among them."""


@contextlib.contextmanager
def answering(answer: Callable[[Request], Reply]) -> Generator[str]:
    """An HTTP server that answers every request as `answer` says; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, data, headers = answer(Request(self.command, self.path, self.headers, body))
            self.send_response(status)
            pieces = [data] if isinstance(data, bytes) else data
            length = {"Content-Length": str(len(data))} if isinstance(data, bytes) else {}
            for name, value in (length | dict(headers)).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.writelines(pieces)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = reply

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Proxy:
    """A TCP proxy on loopback: `cut` refuses and breaks connections, `stall` lets them hang, `bytes_per_s`
    slows."""

    def __init__(self, target: int):
        self.target, self.port = target, 0
        self.bytes_per_s = self.down_bytes_per_s = 0.0
        """Towards the target, and back."""
        self.passed = 0
        """Bytes that went towards the target."""
        self.returned = 0
        """Bytes that came back."""
        self._mode = "open"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self.restore()

    def restore(self) -> None:
        self._mode = "open"
        if self._listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(64)
            self.port = listener.getsockname()[1]
            self._listener = listener
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        self._mode = "cut"
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        self._mode = "stall"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, upward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self._mode == "stall":
                    time.sleep(0.05)
                if self._mode == "cut":
                    break
                target.sendall(data)
                if upward:
                    self.passed += len(data)
                    if self.bytes_per_s:
                        time.sleep(len(data) / self.bytes_per_s)
                    continue
                self.returned += len(data)
                if self.down_bytes_per_s:
                    time.sleep(len(data) / self.down_bytes_per_s)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target: int) -> Generator[Proxy]:
    """A `Proxy` before the port `target`."""
    relay = Proxy(target)
    try:
        yield relay
    finally:
        relay.cut()
