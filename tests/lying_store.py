"""An S3 server before a real one that can be told to lie: listings in small pages, listings of a while ago,
uploads that are acknowledged and lost."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Generator
from urllib.parse import parse_qs, quote, urlsplit

from tests.servers import Reply, Request, answering

FORWARDED = ("content-type", "range", "if-match", "if-none-match", "x-amz-content-sha256", "authorization")
RETURNED = ("Content-Type", "ETag", "Last-Modified", "Content-Range", "Accept-Ranges")

EMPTY = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>bucket</Name><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    b"</ListBucketResult>"
)


class LyingStore:
    """What is told to the server on `port`, and what it has counted."""

    def __init__(self, target: int):
        self.target = target
        self.port = 0
        self.page = 0
        """Keys in a page of a listing; 0: as many as the client asks for."""
        self.listings = 0
        """Pages that were asked for."""
        self.stale = False
        """Whether a listing is answered as the same one was answered first since this was set."""
        self.empty = False
        """Whether a listing is answered with no key."""
        self.loses = ""
        """Uploads of keys that end so are acknowledged and dropped; empty: none are."""
        self.spoils = ""
        """Uploads of keys that end so are kept with one byte changed; empty: none are."""
        self.lost: list[str] = []
        self._remembered: dict[str, tuple[int, dict[str, str], bytes]] = {}

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the reply."""
        parts = urlsplit(path)
        query = parse_qs(parts.query, keep_blank_values=True)
        if method == "GET" and query.get("list-type") == ["2"]:
            self.listings += 1
            if self.page:
                query["max-keys"] = [str(self.page)]
                path = parts.path + "?" + "&".join(f"{k}={quote(v[0], safe='')}" for k, v in query.items())
            if self.empty:
                return 200, {"Content-Type": "application/xml"}, EMPTY
            if self.stale:
                if path not in self._remembered:
                    self._remembered[path] = self.forward(method, path, headers, body)
                return self._remembered[path]
        if method == "PUT" and self.loses and parts.path.endswith(self.loses):
            self.lost.append(parts.path)
            return 200, {"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'}, b""
        if method == "PUT" and self.spoils and parts.path.endswith(self.spoils):
            body = body[:-1] + bytes([body[-1] ^ 1]) if body else body
        return self.forward(method, path, headers, body)

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """What the real server says."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            data = reply.read()
            kept = {name: reply.headers[name] for name in RETURNED if reply.headers[name]}
            length = reply.headers["Content-Length"] if method == "HEAD" else str(len(data))
            return reply.status, kept | {"Content-Length": length or "0"}, data

    def remember(self) -> None:
        """From here on every listing is the one of now."""
        self._remembered.clear()
        self.stale = True


@contextlib.contextmanager
def lying_store(target: int) -> Generator[LyingStore]:
    """A `LyingStore` before the S3 server on the port `target`, which must check no signatures (moto)."""
    store = LyingStore(target)

    def answer(request: Request) -> Reply:
        headers = {k: v for k, v in request.headers.items() if k.lower() in FORWARDED}
        status, returned, data = store.answer(request.method, request.path, headers, request.body)
        return status, data, returned

    with answering(answer) as url:
        store.port = int(url.rpartition(":")[2])
        yield store
