"""A cache that is bounded by bytes, not by entries: images differ in size by a factor of four thousand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

ENTRY_BYTES = 512
"""Bytes that are counted for every entry in addition to its value."""


class ByteCache:
    """A cache that drops the least recently used values first.

    Several threads may use it; two of them may then make the same value.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """The value of `key`, made if it is not held. A value of more than `limit_bytes` is not kept."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        value = make()
        entry_bytes = size(value) + ENTRY_BYTES
        with self._lock:
            if key not in self._held and entry_bytes <= self.limit_bytes:
                self._held[key] = value, entry_bytes
                self.held_bytes += entry_bytes
                while self.held_bytes > self.limit_bytes:
                    _, (_, freed_bytes) = self._held.popitem(last=False)
                    self.held_bytes -= freed_bytes
        return value
