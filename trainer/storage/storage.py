"""Object storage behind one small class: s3://, gs://, r2://, file:// and plain paths, through obstore.

What it adds to obstore: whole-file retry with backoff (obstore retries requests, but an upload whose server went away
is lost), uploads that skip what is already there, and downloads that are verified while they stream. Nothing here rests
on ETags or conditional writes: stores disagree about both.

`python -m trainer.storage cp SOURCE TARGET` copies a file or a folder either way with a progress bar; `ls URL` lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from trainer.config import ConfigError
from trainer.storage.stores import Retry, open_store

T = TypeVar("T")
Listing = list[tuple[str, int]]
"""(key, bytes) pairs."""
Progress = Callable[[int], None]
"""Called with the number of bytes that have just been handed over."""


class StorageError(RuntimeError):
    """The store failed for longer than the retries last."""


class Storage:
    """One prefix of one store. Keys are relative to it, with forward slashes.

    Raises ConfigError for a URL or credentials that cannot work, FileNotFoundError for a missing key, and StorageError
    when the retries are used up.
    """

    def __init__(self, url: str | os.PathLike, *, env: Mapping[str, str] = os.environ, retry: Retry | None = None):
        self.url = os.fspath(url).rstrip("/")
        self.retry = retry or Retry()
        self.retries = 0
        self._lock = threading.Lock()
        self._store, self.limits = open_store(self.url, env, self.retry)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __reduce__(self) -> tuple:
        return (_reopen, (self.url, self.retry))

    def put(self, path: str | Path, key: str, progress: Progress | None = None, *, sha256: str = "") -> bool:
        """Uploads one file; it appears whole or not at all. Returns False if it was already there.

        With `sha256` the upload is resumable per file: `key.sha256` is written after the file, and a file of the same
        size whose note has the same sum is not sent again.
        """
        path = Path(path)
        size = path.stat().st_size
        if sha256 and self._has(key, size, sha256):
            if progress:
                progress(size)
            return False
        if sha256:
            self.delete([_note(key)])
        part = self.limits.part_for(size)

        def send() -> None:
            with _Counted(path, progress) if progress else contextlib.nullcontext(path) as source:
                obstore.put(self._store, key, source, chunk_size=part, max_concurrency=self.limits.parallel_parts)

        self._try(f"upload of {key}", send)
        if sha256:
            self.put_bytes(_note(key), f"{sha256} {size}\n".encode())
        return True

    def get(self, key: str, path: str | Path, progress: Progress | None = None, *, sha256: str = "") -> int:
        """Downloads one file to `path`, in place only when it is whole. Returns its bytes.

        Raises ValueError if `sha256` is given and the bytes have another sum.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")

        def fetch() -> int:
            digest, count = hashlib.sha256(), 0
            answer = obstore.get(self._store, key)
            with open(partial, "wb") as file:
                for chunk in answer.stream(min_chunk_size=4 << 20):
                    file.write(chunk)
                    digest.update(chunk)
                    count += len(chunk)
                    if progress:
                        progress(len(chunk))
            if count != answer.meta["size"]:
                raise exceptions.GenericError(f"{key}: got {count} of {answer.meta['size']} bytes")
            if sha256 and digest.hexdigest() != sha256:
                raise ValueError(f"{key} in {self.url} is damaged: its sha256 is not the one that was written")
            return count

        try:
            count = self._try(f"download of {key}", fetch)
            partial.replace(path)
            return count
        finally:
            partial.unlink(missing_ok=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Writes a small object in one request."""
        self._try(f"upload of {key}", lambda: obstore.put(self._store, key, data, use_multipart=False))

    def get_bytes(self, key: str) -> bytes:
        """Reads a small object."""
        return self._try(f"download of {key}", lambda: bytes(obstore.get(self._store, key).bytes()))

    def list(self, prefix: str = "") -> Listing:
        """(key, bytes) of every object below the folder `prefix`, sorted."""

        def fetch() -> Listing:
            batches = obstore.list(self._store, prefix=prefix or None, chunk_size=1000)
            return sorted((meta["path"], meta["size"]) for batch in batches for meta in batch)

        return self._try(f"listing of {prefix or self.url}", fetch)

    def exists(self, key: str) -> bool:
        """Whether there is an object at `key`."""
        return self.size(key) is not None

    def size(self, key: str) -> int | None:
        """Bytes of the object at `key`; None if there is none."""
        try:
            return self._try(f"look-up of {key}", lambda: obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are not there are no error."""

        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, key)

        for key in keys:
            self._try(f"deletion of {key}", lambda key=key: remove(key))

    def _has(self, key: str, size: int, sha256: str) -> bool:
        try:
            return self.get_bytes(_note(key)).decode().split() == [sha256, str(size)] and self.size(key) == size
        except FileNotFoundError:
            return False

    def _try(self, what: str, action: Callable[[], T]) -> T:
        for attempt in range(self.retry.attempts):
            try:
                return action()
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{what}: not in {self.url}") from error
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise ConfigError(f"{what}: {self.url} refuses the credentials ({_first(error)}): {_HINT}") from error
            except (exceptions.BaseError, ConnectionError, TimeoutError) as error:
                if attempt + 1 == self.retry.attempts:
                    raise StorageError(f"{what} failed {attempt + 1} times at {self.url}: {_first(error)}") from error
                with self._lock:
                    self.retries += 1
                wait = self.retry.wait_s(attempt)
                print(f"storage: {what} failed ({_first(error)}); again in {wait:.1f} s", file=sys.stderr, flush=True)
                time.sleep(wait)
        raise AssertionError("a retry needs at least one attempt")


def _note(key: str) -> str:
    return key + ".sha256"


def _reopen(url: str, retry: Retry) -> Storage:
    return Storage(url, retry=retry)


def _first(error: BaseException) -> str:
    text = " ".join(str(error).split("\n\nDebug source")[0].split())
    return text if len(text) <= 300 else text[:300] + "…"


_HINT = "check the key, its rights on the bucket, and the endpoint"


class _Counted:
    """A file that reports what is read from it, and takes the report back if the upload fails.

    Reading through Python costs a third of the speed: only where somebody watches.
    """

    def __init__(self, path: Path, progress: Progress):
        self._file, self._progress, self._count = open(path, "rb"), progress, 0  # noqa: SIM115

    def __enter__(self) -> Any:  # obstore takes anything with read, seek and tell
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._file.close()
        if kind:
            self._progress(-self._count)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._count += len(data)
        self._progress(len(data))
        return data

    def seek(self, *args: int) -> int:
        return self._file.seek(*args)

    def tell(self) -> int:
        return self._file.tell()
