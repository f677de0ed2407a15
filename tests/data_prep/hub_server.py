"""A loopback server in the hub's layout that `huggingface_hub` really downloads from, with faults to
order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1000
"""Files from this size on are large files: behind a redirect, with a sha256; smaller ones have git's hash."""


def commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + hashlib.sha256(files[name]).digest())
    return digest.hexdigest()


@dataclass
class Hub:
    """What the server serves, and what it saw."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Repository -> commit -> path -> content."""
    heads: dict[str, str] = field(default_factory=dict)
    """Repository -> commit that `main` means."""
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """Path -> the connection is dropped after so many bytes, once per entry."""
    corrupt: dict[str, int] = field(default_factory=dict)
    """Path -> how many times its body is sent with one byte changed."""
    fails: dict[str, int] = field(default_factory=dict)
    """Name of a file -> the status that requests for it are answered with; 0: the connection is closed
    instead."""
    answers_with: dict[str, str] = field(default_factory=dict)
    """Commit -> the other one that is served in its place."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range header)."""
    url: str = ""
    cdn: str = ""
    """The same under another name: a client keeps the headers of a redirect only if it leads to another
    host."""

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """Publishes a commit as the new `main`."""
        commit = commit_of(files)
        self.repos.setdefault(repo, {})[commit] = files
        self.heads[repo] = commit
        return commit

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.heads.get(repo) if revision == "main" else self.answers_with.get(revision, revision)
        files = self.repos.get(repo, {}).get(commit or "")
        return (commit, files) if commit and files is not None else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if (status := self.hub.fails.get(parts[-1])) is not None:
            if status:
                return self.send(status, b"", {"Retry-After": "0"})
            self.close_connection = True
            return
        match parts:
            case ["api", "datasets", owner, name, "revision", revision]:
                self.describe(f"{owner}/{name}", revision)
            case ["datasets", owner, name, "resolve", revision, *rest]:
                self.resolve(f"{owner}/{name}", revision, "/".join(rest), body)
            case ["api", "models", owner, name, *rest] if rest[:1] in ([], ["revision"]):
                self.describe(f"{owner}/{name}", rest[1] if rest else "main")
            case ["api", "models", owner, name, "tree", revision]:
                self.tree(f"{owner}/{name}", revision)
            case [owner, name, "resolve", revision, *rest]:
                self.resolve(f"{owner}/{name}", revision, "/".join(rest), body)
            case ["cdn", owner, name, commit, *rest]:
                self.send_file(
                    "/".join(rest), self.hub.repos[f"{owner}/{name}"][commit]["/".join(rest)], {}, body
                )
            case _:
                self.fail(404, "EntryNotFound")

    def describe(self, repo: str, revision: str) -> None:
        found = self.hub.find(repo, revision)
        if not found:
            self.fail(404, "RevisionNotFound" if repo in self.hub.repos else "RepoNotFound")
            return
        commit, files = found
        siblings = []
        for path, data in sorted(files.items()):
            blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            entry: dict = {"rfilename": path, "size": len(data), "blobId": blob}
            if len(data) >= LFS_BYTES:
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                }
            siblings.append(entry)
        info = {
            "_id": "0",
            "id": repo,
            "sha": commit,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        self.send(
            200, json.dumps(info | {"siblings": siblings}).encode(), {"Content-Type": "application/json"}
        )

    def tree(self, repo: str, revision: str) -> None:
        found = self.hub.find(repo, revision)
        files = sorted(found[1].items()) if found else ()
        entries = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files]
        self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def resolve(self, repo: str, revision: str, path: str, body: bool) -> None:
        found = self.hub.find(repo, revision)
        if not found or path not in found[1]:
            self.fail(404, "EntryNotFound")
            return
        commit, files = found
        data = files[path]
        headers = {"X-Repo-Commit": commit}
        if len(data) >= LFS_BYTES:
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{self.hub.cdn}/cdn/{repo}/{commit}/{path}",
            }
            self.send(302, b"", headers)
            return
        headers["ETag"] = '"' + hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest() + '"'
        self.send_file(path, data, headers, body)

    def send_file(self, path: str, data: bytes, headers: dict[str, str], body: bool) -> None:
        start = 0
        whole = len(data)
        if asked := self.headers.get("Range", ""):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        if body and self.hub.corrupt.get(path, 0) > 0:
            self.hub.corrupt[path] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        cut = self.hub.cut_after.get(path) if body else None
        if cut:
            self.send(206 if asked else 200, data[start : start + cut.pop(0)], headers, length=whole - start)
            self.close_connection = True
            return
        self.send(206 if asked else 200, data[start:] if body else b"", headers, length=whole - start)

    def fail(self, code: int, kind: str) -> None:
        self.send(code, b"{}", {"X-Error-Code": kind})

    def send(self, code: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def in_parts(folder: Path, count: int, rename: Callable[[str], str] = str) -> dict[str, bytes]:
    """The files of a model's folder with the weights in `count` files and an index. rename: of the
    tensors."""
    from safetensors.torch import load_file, save

    tensors = {rename(key): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    place = {key: names[i * count // len(tensors)] for i, key in enumerate(sorted(tensors))}
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    files |= {name: save({key: tensors[key] for key in place if place[key] == name}) for name in names}
    return files | {
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": place}).encode()
    }


@contextlib.contextmanager
def serve(address: str = "127.0.0.1", name: str = "localhost", port: int = 0) -> Iterator[Hub]:
    """Runs a hub, on a free port of loopback if no other is given, with nothing in it. name: of the
    address."""
    hub = Hub()
    server = ThreadingHTTPServer((address, port), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url, hub.cdn = (f"http://{host}:{server.server_address[1]}" for host in (address, name))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":  # ADDRESS NAME PORT REPOSITORY FOLDER: until it is killed
    with serve(sys.argv[1], sys.argv[2], int(sys.argv[3])) as running:
        running.add(sys.argv[4], {path.name: path.read_bytes() for path in Path(sys.argv[5]).iterdir()})
        threading.Event().wait()
