"""The one way in which this program asks a server: a judge, a reward server, Ray, a cloud's metadata, the
hub.

Every request ends: its time and the bytes of its reply are bounded. Loopback and a cloud's metadata service
are asked without proxies, whatever `http_proxy` says. Standard library only.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

from trainer.system.errors import ConfigError

MOST_BYTES = 16 << 20
ERROR_BYTES = 4096
"""What is kept of the body of an error."""
METADATA_HOSTS = ("metadata", "metadata.google.internal", "fd00:ec2::254")
HARMLESS_HEADERS = ("accept", "content-type", "user-agent")
"""Headers that a redirect may take to another host."""


class ReplyUnfinished(TimeoutError):
    """A server began its reply, and did not end it in time or within the bytes that a reply may have."""


def send_request(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    most_bytes: int = MOST_BYTES,
    direct: bool = False,
    redirects: int = 0,
) -> bytes:
    """The body of a server's reply, all of which arrives within `timeout_s`.

    direct: without proxies; loopback and metadata always are. redirects: how many are followed. To another
    scheme, host or port they take no credential. A redirect that is not followed is an error.

    Raises:
        ConfigError: `url` is no address of http or https.
        urllib.error.HTTPError: another status than 2xx; `read()` gives the beginning of the body.
        OSError: no reply, or none in time; ReplyUnfinished where it had begun.
    """
    deadline = time.monotonic() + timeout_s
    headers = dict(headers or {})
    while True:
        check_address(url)
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        try:
            return _send_once(request, deadline, most_bytes, direct or is_local(url))
        except urllib.error.HTTPError as error:
            place = error.headers.get("Location", "") if 300 <= error.code < 400 else ""
            if not place:
                raise
            following = urllib.parse.urljoin(url, place)
            if redirects <= 0:
                refused = (
                    f"a redirect to {shown_address(following)}, which is not followed: name the final address"
                )
                raise urllib.error.HTTPError(url, error.code, refused, error.headers, io.BytesIO()) from None
        redirects -= 1
        if _origin(following) != _origin(url):
            headers = {name: value for name, value in headers.items() if name.lower() in HARMLESS_HEADERS}
        url = following


def _send_once(request: urllib.request.Request, deadline: float, most_bytes: int, direct: bool) -> bytes:
    """The body of the reply to one request. Raises as `send_request`."""
    left_s = max(0.001, deadline - time.monotonic())
    connections = _Connections(direct)
    clock = threading.Timer(left_s, connections.break_off)
    clock.daemon = True
    clock.start()
    try:
        with connections.opener.open(request, timeout=left_s) as reply:
            return _whole_body(reply, deadline, most_bytes)
    except urllib.error.HTTPError as error:
        raise _with_its_body(error) from None
    except ReplyUnfinished:
        raise
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= deadline:
            raise TimeoutError("no reply in time") from None
        if isinstance(error, OSError):
            raise
        raise OSError(f"no reply of HTTP: {type(error).__name__}: {error}") from None
    finally:
        clock.cancel()


def _whole_body(reply: http.client.HTTPResponse, deadline: float, most_bytes: int) -> bytes:
    """The body of a reply whose headers have arrived."""
    body = bytearray()
    try:
        while piece := reply.read1(1 << 16):
            body += piece
            if len(body) > most_bytes:
                raise ReplyUnfinished(f"a reply of more than {most_bytes >> 10} KiB")
    except (OSError, http.client.HTTPException, ValueError):
        if time.monotonic() < deadline:
            raise
    if time.monotonic() >= deadline:
        raise ReplyUnfinished("a reply that did not end in time")
    if reply.length:
        raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body)


def _with_its_body(error: urllib.error.HTTPError) -> urllib.error.HTTPError:
    """The same error with the beginning of its body in memory, so that who reads it does not wait."""
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        body = error.read(ERROR_BYTES)
    error.close()
    return urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, io.BytesIO(body))


def check_address(url: str) -> None:
    """Raises ConfigError where `url` is no address of http or https."""
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or any(character <= " " for character in url):
        raise ConfigError(f"{shown_address(url)} is no address: write http://HOST:PORT/... or https://...")


def shown_address(url: str) -> str:
    """An address without user, password and query, for messages."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "what was given"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_local(url: str) -> bool:
    """Whether an address is this machine's own or a cloud's metadata service, which no proxy reaches."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost") or host in METADATA_HOSTS:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_link_local or address.is_unspecified


def _origin(url: str) -> tuple[str, str | None, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.netloc.rpartition("@")[2].rpartition(":")[2]


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens the connections of one request, and follows no redirect. A server that sends a byte now and then
    never lets a socket's own clock end: all of them are ended from outside."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []
        self.opener = urllib.request.OpenerDirector()
        """Opens http and https, and nothing else."""
        outcomes = urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()
        for handler in (self, *outcomes, *([] if direct else [urllib.request.ProxyHandler()])):
            self.opener.add_handler(handler)

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        sockets = self._sockets

        class Noted(http_class):
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        return super().do_open(cast("Any", Noted), req, **options)

    def break_off(self) -> None:
        """Ends whatever is being sent or read."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
