"""A heartbeat of every rank through the store that torchrun's ranks share: all others name who vanishes.

Inside a collective a rank waits for one whose cable was pulled for as long as gloo (30 minutes) or NCCL (10)
does. A thread beside it sees within SILENT_S that nothing comes any more, says so in one line, and ends the
process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trainer.system.exit_codes import EXIT_NODE_LOST

BEAT_S = 2.0
"""Seconds between two beats, and between two looks at those of the others."""
SILENT_S = 60.0
"""After which a rank is lost: loading a library may hold a process for some seconds, and no longer."""
ENDED = b"ended"


class Heartbeat:
    """Beats for this rank and watches all others, until `stop`."""

    def __init__(
        self, store: Any, rank: int, hosts: list[str], silent_s: float = SILENT_S, beat_s: float = BEAT_S
    ) -> None:
        """store: torch's own. hosts: of every rank. Every rank has met the others before."""
        self._store = store
        self._rank = rank
        self._hosts = hosts
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._ending = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._count = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._answered = time.monotonic()
        self.end: Callable[[str], None] = _end

    def start(self) -> Heartbeat:
        self._store.set(self._key(self._rank), b"0")
        self._answered = time.monotonic()
        self._beating.start()
        threading.Thread(target=self._watch_store, name="heartbeat", daemon=True).start()
        return self

    def stop(self) -> None:
        """Says that this rank ends as it should."""
        self._rest()
        self._store.set(self._key(self._rank), ENDED)

    def failed(self, why: str) -> None:
        """Says why this rank ends, to all others."""
        self._rest()
        self._store.set("failed", f"rank {self._rank} on {self._hosts[self._rank]} failed: {why}".encode())

    def _rest(self) -> None:
        """Waits for a beat under way: it would overwrite the last word, and abort a process that ends."""
        self._ending.set()
        self._beating.join(self._silent_s)

    def wait_for_cause(self) -> None:
        """After a broken collective: waits until the rank that broke it is named, which ends this process."""
        time.sleep(self._silent_s + 5 * self._beat_s)

    def _beat(self) -> None:
        try:
            while not self._ending.is_set():
                loss = self._look()
                if loss and not self._ending.is_set():
                    self.end(loss)
                self._ending.wait(self._beat_s)
        except dist.DistError:  # the process that held the store is gone
            if not self._ending.wait(self._beat_s):
                self.end(f"the store on {self._master()}, rank 0's host, is gone")

    def _look(self) -> str:
        """Beats once. Who is lost, in a line; empty if nobody is."""
        self._count += 1
        self._store.set(self._key(self._rank), str(self._count).encode())
        if self._store.check(["failed"]):
            return self._store.get("failed").decode()
        now = time.monotonic()
        self._answered = now
        for rank in range(len(self._hosts)):
            if rank != self._rank and self._store.check([self._key(rank)]):
                beat = self._store.get(self._key(rank))
                if self._seen.get(rank, (b"", 0.0))[0] != beat:
                    self._seen[rank] = beat, now
        silent = []
        for rank, (beat, since) in sorted(self._seen.items()):
            if beat != ENDED and now - since > self._silent_s:
                silent.append(rank)
        return self._lost(silent) if silent else ""

    def _watch_store(self) -> None:
        """The other thread waits for ever for a store whose host is gone."""
        while not self._ending.wait(self._beat_s):
            if time.monotonic() - self._answered > self._silent_s:
                self.end(f"rank 0's host, {self._master()}, has not answered for {self._silent_s:.0f} s")

    def _master(self) -> str:
        return os.environ.get("MASTER_ADDR", self._hosts[0])

    def _lost(self, silent: list[int]) -> str:
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in silent))
        ranks = ", ".join(map(str, silent))
        return f"rank {ranks} on {', '.join(hosts)} has said nothing for {self._silent_s:.0f} s"

    @staticmethod
    def _key(rank: int) -> str:
        return f"alive/{rank}"


def _end(line: str) -> None:
    """Ends the process at once: its main thread may wait in a collective for ever."""
    print(f"error: a worker or node was lost: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_NODE_LOST)
