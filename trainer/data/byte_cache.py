"""A cache that is bounded by bytes, not by entries: images differ in size by a factor of four thousand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

ENTRY_BYTES = 512
"""Counted for every entry besides its value."""


class ByteCache:
    """The least recently used values go first. Safe to use from several threads; a value may then be
    made twice."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """The value of `key`, made if it is not held. One of more than `limit_bytes` is returned but
        not kept."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        value = make()
        n = size(value) + ENTRY_BYTES
        with self._lock:
            if key not in self._held and n <= self.limit_bytes:
                self._held[key] = value, n
                self.held_bytes += n
                while self.held_bytes > self.limit_bytes:
                    self.held_bytes -= self._held.popitem(last=False)[1][1]
        return value
