"""Pushes what a run writes about itself to its bucket while it runs: a desk follows it without reaching the
machine.

Its objects: docs/watching.md; trainer/observe/mirror.py reads them. Stores cannot append. So the last piece
of a file is written again until it holds PIECE_BYTES, and then the next begins: the number of objects grows
with the bytes and not with the time. Every attempt has a prefix of its own, and one that was replaced stops.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.config.growing_file import GrowingFile
from trainer.config.run_folder import (
    ATTEMPTS,
    CONFIG,
    LAUNCH_LOG,
    METRICS,
    NODES,
    PROGRESS,
    ROSTER,
    SAMPLE_IMAGES,
    SAMPLES,
    parse_line,
)
from trainer.config.run_store import STREAM
from trainer.observe.step_profile import REQUEST
from trainer.storage.storage import Storage
from trainer.system.contained_path import inside
from trainer.system.errors import StorageError

PROFILE_REQUEST = "requests/profile"
"""Object below the run's prefix that asks for a profile of the next step."""
PIECE_BYTES = 256 << 10
BURST_BYTES = 1 << 20
"""Most bytes of the job's log that a push takes; of more it takes the newest part."""
LOG_PIECES = 256
"""Pieces of the job's log that are kept: the first LOG_HEAD and the newest."""
LOG_HEAD = 8
IMAGE_BYTES = 64 << 20
"""Bytes of all sample images of an attempt."""
NODE_S = 60.0
"""Least time between two pushed samples of a node; nodes.jsonl on the machine has all of them."""
CLOSE_S = 5.0
"""Time for the last push, as the machine may be about to end."""
WHOLE = (CONFIG, PROGRESS, ATTEMPTS, ROSTER, "preflight.json", "manifest.json")


class PushedFile:
    """A growing file in pieces. Its first `start` bytes are an earlier attempt's."""

    def __init__(self, path: Path, storage: Storage, prefix: str, start: int = 0):
        self.storage = storage
        self.prefix = prefix
        self.left_out = 0
        """Bytes that were not pushed, or are deleted again."""
        self._file = GrowingFile(path, start)
        self._number = 0
        self._outdated = False
        """Whether the pieces in the store are those of a file that was written anew since."""
        self._unsent = False
        self._piece = bytearray()
        self._looked = 0

    def push(self, burst: int = 0, choose: Callable[[bytes], bytes] = bytes) -> None:
        """Pushes the complete lines that are new. burst: the most bytes to take. choose: what of them is
        pushed."""
        chosen = choose(self._file.read())
        if self._file.begun_anew:
            self._outdated = True
            self._number = 0
            self._piece = bytearray()
        if burst and len(chosen) > burst:
            kept = chosen[chosen.find(b"\n", len(chosen) - burst) + 1 :]
            skipped = len(chosen) - len(kept)
            self.left_out += skipped
            chosen = b"[%d bytes of the log are left out here]\n" % skipped + kept
        self._piece += chosen
        self._unsent = self._unsent or bool(chosen)
        if self._outdated:
            self.storage.delete(dict(self.storage.list(self.prefix)))
            self._outdated = False
        while self._unsent:
            cut = len(self._piece)
            if cut > PIECE_BYTES:
                cut = self._piece.rfind(b"\n", 0, PIECE_BYTES) + 1 or self._piece.find(b"\n") + 1
            self.storage.put_bytes(f"{self.prefix}/{self._number:08d}", bytes(self._piece[:cut]))
            if cut == len(self._piece):
                self._unsent = False
            else:
                self._number += 1
                self._piece = self._piece[cut:]

    def drop_middle(self, keep: int, head: int) -> None:
        """Deletes pieces so that the first `head` and the newest ones are left, `keep` in all."""
        if self._number < keep or self._number == self._looked:
            return
        keys = self.storage.list(self.prefix)
        gone = keys[head : len(keys) - (keep - head)]
        deleted = dict(gone)
        self.storage.delete(deleted)
        self.left_out += sum(deleted.values())
        self._looked = self._number


class Stream:
    """Pushes one attempt of a run, from a thread. A store that fails never stops the run: the next push
    catches up."""

    def __init__(
        self, run_dir: str | Path, storage: Storage, attempt: str, every_s: float, fenced: Callable[[], bool]
    ):
        """storage: the run's prefix. fenced: whether the attempt was replaced, after which nothing is
        written."""
        self.run_dir = Path(run_dir)
        self.storage = storage
        self.every_s = every_s
        self.fenced = fenced
        self.prefix = f"{STREAM}/{attempt}"
        self.failures = 0
        self._born = time.time() - 1.0  # clocks of file systems are coarse
        self._growing: dict[str, PushedFile] = {}
        for name in (LAUNCH_LOG, NODES, METRICS, SAMPLES):
            path = self.run_dir / name
            start = path.stat().st_size if name in (LAUNCH_LOG, NODES) and path.exists() else 0
            self._growing[name] = PushedFile(path, storage, f"{self.prefix}/{name}", start)
        self._sent: dict[str, Any] = {}
        self._node_times: dict[int, float] = {}
        self._image_bytes = 0
        self._images_left_out = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            over = self._over.wait(self.every_s)
            if self.fenced():
                return
            try:
                self.push()
                self.requested()
            except (StorageError, ConfigError, OSError) as error:
                self.failures += 1
                if self.failures & (self.failures - 1) == 0:  # at 1, 2, 4, 8, ... failures
                    times = f"({self.failures} times)"
                    text = f"stream: what the run writes did not reach the bucket {times}: {error}"
                    print(text, file=sys.stderr, flush=True)
            if over:
                return

    def push(self) -> None:
        """Pushes what is new."""
        log = self._growing[LAUNCH_LOG]
        log.push(BURST_BYTES)
        log.drop_middle(LOG_PIECES, LOG_HEAD)
        self._growing[NODES].push(choose=self._thinned)
        if self._fresh(ATTEMPTS):  # before that, the metrics are those that an earlier attempt left
            self._growing[METRICS].push()
            self._growing[SAMPLES].push(choose=self._with_images)
        hangs = [str(path.relative_to(self.run_dir)) for path in sorted(self.run_dir.glob("hang-*/*"))]
        for name in (*WHOLE, *hangs):
            if self._fresh(name):
                self._whole(name)
        left = {"log_bytes": log.left_out, "images": self._images_left_out, "failures": self.failures}
        if any(left.values()) and left != self._sent.get("left_out.json"):
            self.storage.put_bytes(f"{self.prefix}/left_out.json", json.dumps(left).encode())
            self._sent["left_out.json"] = left

    def requested(self) -> None:
        """Passes on a request for a profile of the next step, left in the bucket by `launch.py profile`."""
        with contextlib.suppress(FileNotFoundError):
            self.storage.get_bytes(PROFILE_REQUEST)
            (self.run_dir / REQUEST).touch()
            self.storage.delete([PROFILE_REQUEST])

    def _fresh(self, name: str) -> bool:
        """Whether this attempt has written the file."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run_dir / name).stat().st_mtime >= self._born
        return False

    def _whole(self, name: str) -> None:
        stat = (self.run_dir / name).stat()
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._sent.get(name) != mark:
            self.storage.put_bytes(f"{self.prefix}/{name}", (self.run_dir / name).read_bytes())
            self._sent[name] = mark

    def _thinned(self, new: bytes) -> bytes:
        """At most one sample per NODE_S of every node."""
        kept = []
        for line in new.splitlines(keepends=True):
            sample = parse_line(line)
            if sample is None:  # a full disk or a kill has torn it
                continue
            if sample["unix_s"] - self._node_times.get(sample["node"], 0.0) >= NODE_S:
                self._node_times[sample["node"]] = sample["unix_s"]
                kept.append(line)
        return b"".join(kept)

    def _with_images(self, new: bytes) -> bytes:
        """Pushes the images of samples first, so that whoever reads a sample finds them."""
        for line in new.splitlines(keepends=True):
            for name in (parse_line(line) or {}).get("images", []):
                path = inside(self.run_dir / SAMPLE_IMAGES, str(name).removeprefix(f"{SAMPLE_IMAGES}/"))
                if path is None or name in self._sent or not path.is_file():
                    continue
                if self._image_bytes + path.stat().st_size > IMAGE_BYTES:
                    self._images_left_out += 1
                else:
                    self.storage.put_bytes(f"{self.prefix}/{name}", path.read_bytes())
                    self._image_bytes += path.stat().st_size
                self._sent[name] = True
        return new

    def close(self) -> None:
        """One last push, within CLOSE_S."""
        self._over.set()
        self._thread.join(CLOSE_S)
