"""Object storage behind one small class: s3://, gs://, r2://, file:// and plain paths, through obstore. What
it adds to obstore: whole-file retry with backoff (obstore retries requests, but an upload whose server went
away is lost), uploads that skip what is already there, downloads that resume from where they were cut off and
are verified while they stream, and permanent errors raised at once with their fix."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from trainer.config import ConfigError
from trainer.storage.store_replies import code_of, permanent_cause, status_of
from trainer.storage.stores import (
    DOWNLOAD_TIMEOUT_S,
    PATIENT,
    RetryPolicy,
    open_store,
    parallel_parts,
    part_for,
)
from trainer.system.errors import ObjectTooLarge, StorageError, StoreRefused
from trainer.system.redaction import without_secrets
from trainer.system.server_waits import waiting_for

T = TypeVar("T")
Listing = list[tuple[str, int]]
"""(key, bytes) pairs."""
Progress = Callable[[int], None]
"""Called with the number of bytes just transferred."""
TELL_S = 30.0
"""Seconds between progress lines of a long download."""
SMALL_TIMEOUT_S = 60.0
"""Deadline of a request that moves little: a listing's page, a look-up, a deletion, an attempt's record."""
WAIT_S = 1200.0
"""Time after a first failure for which the run's watchdog takes further tries for progress."""
PROOF_BYTES = 1 << 20
"""Read back of an upload, at each of two places."""
CHUNK_BYTES = 256 << 10
"""Smallest chunk of a download, bytes."""


class Storage:
    """One prefix of one store. Keys are relative to it, with forward slashes. Raises ConfigError for a URL or
    credentials that cannot work, FileNotFoundError for a missing key, and StorageError when the retries are
    used up."""

    def __init__(
        self, url: str | os.PathLike, *, env: Mapping[str, str] = os.environ, retry: RetryPolicy | None = None
    ):
        self.url = os.fspath(url)
        self.retry = retry or RetryPolicy()
        self.retries = 0
        self._lock = threading.Lock()
        patience_s = self.retry.request_timeout_s
        self._store = open_store(self.url, env, self.retry, patience_s)
        self.url = self.url.rstrip("/")
        self._slow_store = open_store(self.url, env, self.retry, DOWNLOAD_TIMEOUT_S)
        self._quick_store = open_store(self.url, env, self.retry, patience_s or SMALL_TIMEOUT_S)
        self._ranges = True

    def __reduce__(self) -> tuple:
        return partial(Storage, retry=self.retry), (self.url,)

    def put(self, path: str | Path, key: str, *, sha256: str = "") -> bool:
        """Uploads one file; it appears whole or not at all. Returns False if it was already there. With
        `sha256` the upload is resumable per file: `key.sha256` is written after the file, and a file of the
        same size whose note has the same sum is not sent again."""
        path = Path(path)
        size = path.stat().st_size
        if sha256 and self._has(key, size, sha256):
            return False
        if sha256:
            self.delete([_note(key)])
        part = part_for(size)
        how = {"chunk_size": part, "max_concurrency": parallel_parts(part)}
        self._try(f"upload of {key}", partial(obstore.put, self._store, key, path, **how), whole=True)
        if sha256:
            self.put_bytes(_note(key), f"{sha256} {size}\n".encode())
        return True

    def get(self, key: str, path: str | Path, progress: Progress | None = None, *, sha256: str = "") -> int:
        """Downloads one file to `path`, in place only when it is whole. Returns its bytes. There is no
        deadline for the whole, however slow the link: a download that stalls or breaks resumes from the byte
        that it has reached. Raises ValueError if `sha256` is given and the bytes have another sum."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        digest = hashlib.sha256()
        try:
            with open(partial, "wb") as file:

                def take(chunk: Any) -> None:
                    file.write(chunk)
                    digest.update(chunk)
                    if progress:
                        progress(len(chunk))

                count = self._download(key, take)
            if sha256 and digest.hexdigest() != sha256:
                raise ValueError(
                    f"{key} in {self.url} is damaged: its sha256 is not the one that was written"
                )
            partial.replace(path)
            return count
        finally:
            partial.unlink(missing_ok=True)

    def _download(
        self, key: str, take: Callable[[Any], None], start: int = 0, stop: int | None = None
    ) -> int:
        """Passes bytes [start, stop) of an object to `take`, in order; None: to its end. Returns their
        number."""
        at = start
        size = -1
        began = time.monotonic()
        printed = began

        def stream() -> None:
            nonlocal at, size, printed
            skip = 0 if self._ranges else at
            part = {"range": {"offset": at} if stop is None else (at, stop)}
            options: Any = part if self._ranges and (at or stop is not None) else None
            answer = self._in_time(lambda: obstore.get(self._slow_store, key, options=options))
            size, chunks = answer.meta["size"], answer.stream(min_chunk_size=CHUNK_BYTES)
            size = size if stop is None else min(size, stop)
            while at != size:
                chunk = self._in_time(lambda: next(chunks, None))
                if chunk is None:
                    break
                view = memoryview(chunk)[skip:][: size - at]
                skip = max(0, skip - len(chunk))
                take(view)
                at += len(view)
                if (now := time.monotonic()) - printed > TELL_S:
                    printed = now
                    done = f"{at / 2**20:.0f} of {size / 2**20:.0f} MiB"
                    rate = (at - start) / 2**20 / (now - began)
                    print(f"storage: {key}: {done}, {rate:.1f} MiB/s", file=sys.stderr, flush=True)
            if at != size:
                raise exceptions.GenericError(f"{key}: got {at} of {size} bytes")

        failures = 0
        with contextlib.ExitStack() as waits:
            while at != size:
                before = at
                try:
                    stream()
                except _FAILURES as error:
                    if "non-partial response" in str(error):
                        self._ranges = False  # this store sends the whole object whatever is asked for
                        continue
                    failures = 0 if at > before else failures + 1
                    self._failed(waits, f"download of {key} (at byte {at})", error, failures)
        return at - start

    def _in_time(self, call: Callable[[], T]) -> T:
        """Returns what a blocking call returns. Raises TimeoutError when that takes longer than `stall_s`.
        The call runs in a thread, which a stall leaves behind. obstore's asynchronous calls are not used:
        they end in a thread of its own that needs the interpreter, and a process that exits at that moment is
        aborted (2% of short downloads)."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return answer.result(self.retry.stall_s)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Writes a small object in one request."""
        put = partial(obstore.put, self._store, key, data, use_multipart=False)
        self._try(f"upload of {key}", put, whole=True)

    def put_proven(self, key: str, data: bytes) -> None:
        """Writes a small object and reads it back. Raises StorageError where the store has lost it, or keeps
        other bytes."""
        self.put_bytes(key, data)
        try:
            kept = self.get_bytes(key)
        except FileNotFoundError:
            raise StorageError(f"{self.url} does not have {key}, which it took") from None
        if kept != data:
            raise StorageError(f"{self.url} keeps other bytes of {key} than it was sent")

    def check_kept(self, path: Path, key: str) -> None:
        """Compares two MiB of an object with the file that it was made of: one at a random place, and its
        last. Raises StorageError where they differ: not every store keeps a checksum."""
        size = path.stat().st_size
        for start in (secrets.randbelow(max(1, size - PROOF_BYTES)), max(0, size - PROOF_BYTES)):
            with path.open("rb") as file:
                file.seek(start)
                sent = file.read(PROOF_BYTES)
            if self.get_range(key, start, start + len(sent)) != sent:
                raise StorageError(
                    f"{self.url} keeps other bytes of {key} than it was sent (at byte {start})"
                )

    def create(self, key: str, data: bytes) -> bool:
        """Writes a small object that must not exist yet, by a conditional put; False if another writer was
        first. data: no two writers' bytes may be equal. Where the store ignores or refuses the condition,
        this is a look-up, a put and a re-read: of two writers at once the later one wins, and the earlier one
        sees it when it reads again."""

        def put() -> None:
            try:
                obstore.put(self._quick_store, key, data, use_multipart=False, mode="create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError):
                pass
            except (exceptions.NotSupportedError, exceptions.GenericError) as error:
                if isinstance(error, exceptions.GenericError) and status_of(error) not in (400, 409, 501):
                    raise
                if not self.exists(key):
                    obstore.put(self._quick_store, key, data, use_multipart=False)

        self._try(f"upload of {key}", put, whole=True)
        try:
            return self.get_bytes(key) == data
        # a store that replaces an object by removing it first: the other writer is later
        except FileNotFoundError:
            return False

    def get_bytes(self, key: str, most_bytes: int = 0) -> bytes:
        """An object in memory. most_bytes: the largest that is read; 0: any. Raises FileNotFoundError,
        ObjectTooLarge."""

        def fetch() -> bytes:
            answer = obstore.get(self._store, key)
            size = answer.meta["size"]
            if most_bytes and size > most_bytes:
                raise ObjectTooLarge(f"{key} has {size:,} bytes, and at most {most_bytes:,} are read")
            return bytes(answer.bytes())

        return self._try(f"download of {key}", fetch)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object, as `get` fetches; from a store without ranges all before them is
        read."""
        data = bytearray()
        self._download(key, data.extend, start, stop)
        return bytes(data)

    def list(self, prefix: str = "") -> Listing:
        """(key, bytes) of every object below the folder `prefix`, sorted."""

        def fetch() -> Listing:
            sizes: dict[str, int] = {}
            for batch in obstore.list(self._quick_store, prefix=prefix or None, chunk_size=1000):
                known = len(sizes)
                sizes |= {meta["path"]: meta["size"] for meta in batch}
                if batch and len(sizes) == known:
                    raise StorageError(
                        f"{self.url} lists the same keys again and again: it cannot hold a run"
                    )
            return sorted(sizes.items())

        return self._try(f"listing of {prefix or 'everything'}", fetch, whole=True)

    def folders(self) -> tuple[str, ...]:
        """Names of the folders right below this prefix, sorted; what lies in them is not listed."""

        def fetch() -> tuple[str, ...]:
            paths = obstore.list_with_delimiter(self._quick_store)["common_prefixes"]
            return tuple(sorted(str(path).rpartition("/")[2] for path in paths))

        return self._try("listing of folders", fetch, whole=True)

    def exists(self, key: str) -> bool:
        """Whether there is an object at `key`."""
        return self._head(key) is not None

    def size(self, key: str) -> int | None:
        """Bytes of the object at `key`; None if there is none."""
        meta = self._head(key)
        return meta["size"] if meta else None

    def written_s(self, key: str) -> float | None:
        """Unix time at which the object at `key` was written, by the store's clock; None if there is none."""
        meta = self._head(key)
        return meta["last_modified"].timestamp() if meta else None

    def _head(self, key: str) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return self._try(f"look-up of {key}", partial(obstore.head, self._quick_store, key))

    def clock_s(self) -> float:
        """Unix time by the store's clock, as it stamps a small object, which is removed again. Raises
        StorageError where the store keeps none."""
        key = f"clock-{secrets.token_hex(6)}"
        self.put_bytes(key, b"What time is it?")
        try:
            written_s = self.written_s(key)
        finally:
            self.delete([key])
        if written_s is None:
            raise StorageError(f"{self.url} keeps nothing of what it acknowledges")
        return written_s

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are not there are no error."""

        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._quick_store, key)

        for key in keys:
            self._try(f"deletion of {key}", lambda key=key: remove(key))

    def _has(self, key: str, size: int, sha256: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            note = self.get_bytes(_note(key)).decode().split()
            return note == [sha256, str(size)] and self.size(key) == size
        return False

    def _try(self, request: str, action: Callable[[], T], *, whole: bool = False) -> T:
        """The action's result, tried again after errors that may pass. whole: a 404 can only mean the
        bucket."""
        attempt = 0
        with contextlib.ExitStack() as waits:
            while True:
                try:
                    return action()
                except _FAILURES as error:
                    attempt += 1
                    self._failed(waits, request, error, attempt, whole)

    def _failed(
        self,
        waits: contextlib.ExitStack,
        request: str,
        error: BaseException,
        attempt: int,
        whole: bool = False,
    ) -> None:
        """Raises a permanent error, or the last attempt's; else prints the error and waits, which the run is
        told of until `waits` is closed."""
        if cure := permanent_cause(error, bucket_missing_is_404=whole):
            reply = f"{status_of(error) or ''} {code_of(error)}".strip() or _first(error)
            kind = StoreRefused if status_of(error) in (401, 403) else ConfigError
            raise kind(f"{request} at {self.url}: {cure} ({reply})") from error
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"{request}: not in {self.url}") from error
        reason = _first(error) or f"no byte for {self.retry.stall_s:.0f} s"
        if attempt >= self.retry.attempts:
            raise StorageError(f"{request} failed {attempt} times at {self.url}: {reason}") from error
        with self._lock:
            self.retries += 1
        if attempt <= 1:
            waits.close()
            waiter = waits.enter_context(waiting_for("storing", f"the store at {self.url}", WAIT_S))
            waiter.failed(reason)
        wait = self.retry.wait_s(max(1, attempt))  # 0 where the download got further since
        print(f"storage: {request} failed ({reason}); again in {wait:.1f} s", file=sys.stderr, flush=True)
        time.sleep(wait)


def probe_store(
    url: str, *, write: bool = True, env: Mapping[str, str] = os.environ, retry: RetryPolicy = PATIENT
) -> None:
    """Puts, lists, reads and deletes one small object below `url`, in a second, before anything expensive
    starts; with write=False only lists. Raises ConfigError, in one line that says what to change, for what no
    retry can cure (wrong key or secret, no such bucket, a missing right, another region, a clock that is
    off); StorageError for a store that stays away."""
    storage = Storage(url, env=env, retry=retry)
    if not write:
        storage.list()
        return
    key = f"probe-{secrets.token_hex(6)}"
    data = b"SpotRL: whether this store can be written, read and cleared."
    storage.put_bytes(key, data)
    try:
        storage.list()
        if storage.get_range(key, 8, 16) != data[8:16]:
            raise ConfigError(f"{url}: the store gives back other bytes than it was given: use another one")
    except FileNotFoundError as error:
        raise StorageError(f"{url} keeps nothing of what it acknowledges: {error}") from None
    finally:
        storage.delete([key])


_FAILURES = (exceptions.BaseError, ConnectionError, TimeoutError, FileNotFoundError)


def _note(key: str) -> str:
    return key + ".sha256"


def _first(error: BaseException) -> str:
    text = without_secrets(" ".join(str(error).split("\n\nDebug source")[0].split()))
    return text if len(text) <= 300 else text[:300] + "…"
