"""The file under a shard: written past the page cache, and hashed, both in a thread beside the making of its pages.

Shards are read again only when training begins, perhaps elsewhere. Kept in the page cache they would push out what is
needed now, and on a virtual machine every page of fresh memory costs more than making its content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 << 20
"""Written at once; a multiple of every disk's block."""
BLOCKS = 3
"""In memory: one is filled while others are hashed and written."""


class ShardFile:
    """A binary file that pyarrow can write to. `hexdigest` waits until it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open_direct(path)
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[Any]] = deque()
        self._free = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(BLOCKS)]  # aligned, as direct writing wants it
        self._block, self._filled = self._free.pop(), 0
        self._sha256 = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Takes all of `data`. Raises what writing an earlier block failed with."""
        view = memoryview(data).cast("B")
        size = len(view)
        while len(view):
            part = view[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._send()
                self._block, self._filled = self._free.pop() if self._free else self._pending.popleft().result(), 0
        self._size += size
        return size

    def _send(self) -> None:
        self._pending.append(self._thread.submit(self._put, self._block, self._filled))

    def _put(self, block: mmap.mmap, size: int) -> mmap.mmap:
        with memoryview(block) as whole, whole[:size] as content:
            self._sha256.update(content)
            if size < BLOCK_BYTES:  # the last one: a direct write takes whole blocks only
                _set_direct(self._descriptor, False)
            _write_all(self._descriptor, content)
        return block

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size

    def flush(self) -> None:
        """Nothing: full blocks are written all the same."""

    def close(self) -> None:
        """Takes no more; what is left reaches the disk beside what the caller does next."""
        if not self.closed:
            self.closed = True
            self._send()
            self._pending.append(self._thread.submit(os.fsync, self._descriptor))

    def hexdigest(self) -> str:
        """sha256 of all that was written, once it lies on the disk. Raises what writing failed with."""
        try:
            while self._pending:
                self._pending.popleft().result()
        finally:
            self._thread.shutdown()
            os.close(self._descriptor)
        return self._sha256.hexdigest()

    def writable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """No."""
        return False

    def seekable(self) -> bool:
        """No."""
        return False


def _write_all(descriptor: int, content: memoryview) -> None:
    written = 0
    while written < len(content):
        try:
            with content[written:] as rest:
                written += os.write(descriptor, rest)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            _set_direct(descriptor, False)  # the file system took the flag but not the write, or the last was cut short


def _open_direct(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    _set_direct(descriptor, True)
    return descriptor


def _set_direct(descriptor: int, direct: bool) -> None:
    """Past the page cache or through it. File systems that know no direct writing (tmpfs) go on through it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        if not direct:
            raise
