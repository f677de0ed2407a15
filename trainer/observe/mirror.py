"""Brings a run's stream from its bucket into a local folder, as if the run had written it there.

    python -m trainer.observe.mirror pull URL FOLDER [--every 10] [--weights]    URL: <bucket>/<run id>
    python -m trainer.observe.mirror logs URL FOLDER [--follow]
    python -m trainer.observe.mirror profile URL FOLDER [--fetch]    asks for a profile of the next step
    python -m trainer.observe.mirror runs BUCKET                     what runs are in a bucket

Display and report then read the folder. Pieces that are here already (by key and size) are not fetched again.
Needs obstore and PyYAML only. trainer/observe/stream.py writes what is read here;
trainer/storage/attempt_record.py the record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.config import ConfigError
from trainer.config.run_folder import (
    ATTEMPTS,
    GPU_CHECK,
    GPU_CHECK_PAGE,
    LAUNCH_LOG,
    METRICS,
    NODES,
    PROGRESS,
    SAMPLES,
    read_lines,
    read_progress,
    write_whole,
    written_progress,
)
from trainer.config.run_store import CHECKPOINTS, EXPORTED, PROFILES, STREAM, RunStore
from trainer.observe.stream import PROFILE_REQUEST, WHOLE
from trainer.storage.attempt_record import AttemptRecord, NewestAttempt, attempt_number
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy
from trainer.system.contained_path import inside
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_OK, exit_code
from trainer.system.terminal_text import terminal_line, terminal_text

GROWING = (METRICS, SAMPLES, LAUNCH_LOG, NODES)
FETCHES = 16
"""Objects that are fetched at once."""
WRITTEN = re.compile(
    rf"{STREAM}/[0-9]{{1,12}}-[0-9a-z]{{1,32}}/"
    rf"((?:{'|'.join(map(re.escape, GROWING))})/[0-9]{{8}}|(?:{'|'.join(map(re.escape, WHOLE))})"
    r"|samples/[0-9a-f]{16}\.(?:png|jpeg|webp|gif)|left_out\.json|hang-[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)"
)
"""Keys that a run's stream writes (trainer/observe/stream.py). Of others nothing is fetched: a file of the
desk's own, such as the note which bucket a run is in, would be another's words."""
MOST_BYTES = 64 << 20
"""The largest object of a stream that is fetched: pieces have a few MiB, and logs of a hang some more."""
QUICK = RetryPolicy(attempts=2, request_retries=2, request_retry_s=10.0, stall_s=15.0)
"""Retries while a person waits."""


class RunMirror:
    """One run's stream. Raises ConfigError where the bucket has none, StorageError for one that does not
    answer."""

    def __init__(self, url: str, folder: str | Path):
        self.storage = Storage(url, retry=QUICK)
        self.folder = Path(folder)
        self.cache = self.folder / ".pieces"

    def update(self) -> NewestAttempt | None:
        """Fetches what is new; returns what the record says of the newest attempt."""
        listed = self.storage.list(STREAM)
        listed = [entry for entry in listed if WRITTEN.fullmatch(entry[0])]
        attempts = sorted({key.split("/")[1] for key, _ in listed}, key=attempt_number)
        if not attempts:
            raise ConfigError(
                f"no stream of a run in {self.storage.url}: check the bucket and the run's id; "
                "it begins once the launcher has started its attempt"
            )
        self._fetch(listed, f"{STREAM}/{attempts[-1]}/")
        # The files of an attempt hold the steps of the earlier ones too.
        have = [attempt for attempt in attempts if (self.cache / attempt / METRICS).exists()]
        for name in (METRICS, SAMPLES):
            self._write(name, self._joined(have[-1], name) if have else b"")
        nodes = b""
        logs = b""
        starts = {}
        for attempt in attempts:
            nodes += self._joined(attempt, NODES)
            logs += b"--- attempt %s\n%s" % (attempt.encode(), self._joined(attempt, LAUNCH_LOG))
            self._copy(attempt)
            for start in read_lines(self.cache / attempt / ATTEMPTS):
                if isinstance(start.get("unix_s"), int | float):
                    starts[start["unix_s"]] = start
        self._write(NODES, nodes)
        self._write(LAUNCH_LOG, logs)
        lines = [json.dumps(starts[at], sort_keys=True) + "\n" for at in sorted(starts)]
        self._write(ATTEMPTS, "".join(lines).encode())
        newest = self.newest()
        self._progress(attempts[-1], newest)
        return newest

    def _fetch(self, listed: Sequence[tuple[str, int]], newest: str) -> None:
        """Whole files of the newest attempt may change and keep their size: they are read every time."""
        wanted = []
        for key, size in listed:
            path = inside(self.cache, key.removeprefix(f"{STREAM}/"))
            if size > MOST_BYTES:
                print(f"{key} has {size:,} bytes, which no run writes: it is left out", file=sys.stderr)
            elif path is not None:
                known = path.stat().st_size if path.is_file() else -1
                changes = path.parent.name not in GROWING and path.suffix not in (".jpeg", ".png")
                if known != size or (changes and key.startswith(newest)):
                    wanted.append((key, path))

        def fetch(wanted_file: tuple[str, Path]) -> None:
            key, path = wanted_file
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a log's piece, deleted since it was listed
                write_whole(path, self.storage.get_bytes(key))

        with ThreadPoolExecutor(FETCHES) as pool:
            list(pool.map(fetch, wanted))

    def _joined(self, attempt: str, name: str) -> bytes:
        """The content of a growing file, joined from its pieces."""
        pieces = sorted(p for p in (self.cache / attempt / name).glob("*") if p.name.isdigit())
        return b"".join(map(Path.read_bytes, pieces))

    def _copy(self, attempt: str) -> None:
        """Copies whole files and images; those of a later attempt replace those of an earlier one."""
        for path in sorted((self.cache / attempt).rglob("*")):
            name = path.relative_to(self.cache / attempt)
            if path.is_file() and name.parts[0] not in (*GROWING, ATTEMPTS, PROGRESS):
                self._write(str(name), path.read_bytes())

    def _write(self, name: str, data: bytes) -> None:
        path = inside(self.folder, name)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if (data or path.exists()) and (not path.exists() or path.read_bytes() != data):
            write_whole(path, data)

    def newest(self) -> NewestAttempt | None:
        """The newest attempt by the run's record; None without one."""
        return AttemptRecord(Storage(RunStore(self.storage.url).attempts, retry=QUICK)).newest()

    def _progress(self, attempt: str, newest: NewestAttempt | None) -> None:
        """The newest attempt's own progress, corrected by the record where its process was killed."""
        progress = written_progress(self.cache / attempt) or {"status": "running", "phase": "start"}
        if newest and newest.attempt.left and newest.attempt.code != 0 and newest.final is None:
            progress["restarts"] = newest.attempt.left
        if newest and not newest.alive and progress["status"] == "running":
            message = f"attempt {newest.attempt.name} {_end_of(newest)}"
            progress |= {"message": message, "phase_since_unix_s": newest.seen_unix_s}
            if newest.final is not None:
                progress["status"] = "failed"
            elif newest.attempt.code == EXIT_OK:
                progress["status"] = "finished"
        self._write(PROGRESS, json.dumps(progress).encode())

    def weights(self) -> Path:
        """The exported weights, the largest part of a run: fetched on request. Raises ConfigError without
        any."""
        weights = self.storage.list(f"{CHECKPOINTS}/{EXPORTED}")
        if not weights:
            raise ConfigError("the run has exported no weights: it does so at its end (checkpoint.export_hf)")
        for key, _ in weights:
            self._get(key, key.removeprefix(f"{CHECKPOINTS}/"))
        return self.folder / EXPORTED

    def _get(self, key: str, name: str) -> None:
        """Fetches an object into the folder; one whose name leads out of it is left where it is."""
        path = inside(self.folder, name)
        if path is not None:
            self.storage.get(key, path)

    def gpu_check(self) -> None:
        """Fetches the findings of a GPU check, if the run is one."""
        for name in (GPU_CHECK, GPU_CHECK_PAGE):
            if self.storage.exists(name):
                self._get(name, name)

    def request_profile(self) -> str:
        """Asks the run for a profile of its next step. Raises ConfigError where it is over."""
        if run_has_ended(self, self.update()):
            raise ConfigError("the run is over: set logging.profile_step and start it again")
        self.storage.put_bytes(PROFILE_REQUEST, b"")
        return (
            "the next step is profiled once the run has seen the request (logging.push_every_s): see its log"
        )

    def profiles(self) -> str:
        """Fetches every profile that there is; returns the folder. Raises ConfigError without any."""
        files = self.storage.list(PROFILES)
        if not files:
            raise ConfigError("the run has profiled no step yet: `python3 launch.py profile RUN` asks it to")
        for key, _ in files:
            if not (self.folder / key).exists():
                self._get(key, key)
        return str(self.folder / PROFILES)


def _end_of(newest: NewestAttempt) -> str:
    """How an attempt that lives no more ended."""
    if newest.attempt.code is None:
        return f"has been silent since {time.strftime('%H:%M:%S', time.gmtime(newest.seen_unix_s))} UTC"
    return f"ended with {newest.attempt.code}{f' ({newest.why})' if newest.why else ''}"


def run_has_ended(mirror: RunMirror, newest: NewestAttempt | None) -> bool:
    """Whether the run is over, as far as the bucket tells."""
    over = newest is not None and newest.final is not None
    return over or read_progress(mirror.folder).get("status", "running") != "running"


def show_log(mirror: RunMirror, follow: bool, every_s: float) -> None:
    """Prints the log, and with `follow` what comes to it until the run is over."""
    at, path = 0, mirror.folder / LAUNCH_LOG
    while True:
        over = run_has_ended(mirror, mirror.update()) or not follow
        data = path.read_bytes() if path.exists() else b""
        at = min(at, len(data))  # it is shorter where the middle of a long log was deleted
        sys.stdout.write(terminal_text(data[at:].decode(errors="replace")))
        sys.stdout.flush()
        at = len(data)
        if over:
            return
        time.sleep(every_s)


def run_lines(bucket: str) -> list[str]:
    """Two lines for every run in a bucket, the last begun last: its id and when it began; how it stands, and
    why. Raises ConfigError where there is none."""
    storage = Storage(bucket, retry=QUICK)

    def look(run: str) -> tuple[str, NewestAttempt | None]:
        try:
            return run, RunMirror(RunStore.in_bucket(storage.url, run).root, "").newest()
        # A record that is not whole, or that cannot be read, must not hide the other runs.
        except (ConfigError, StorageError) as error:
            print(terminal_line(f"{run}: {error}"), file=sys.stderr, flush=True)
            return run, None

    with ThreadPoolExecutor(FETCHES) as pool:
        standing = [(run, newest) for run, newest in pool.map(look, storage.folders()) if newest]
    if not standing:
        raise ConfigError(f"no run in {bucket}: check the bucket and its prefix")
    lines = []
    for run, newest in sorted(standing, key=lambda pair: pair[1].attempt.begun_unix_s):
        began = time.strftime("%m-%d %H:%M", time.gmtime(newest.attempt.begun_unix_s))
        lines += [f"{terminal_line(run):<66}{began}", f"  {terminal_line(describe_standing(newest))}"]
    return lines


def describe_standing(newest: NewestAttempt) -> str:
    """How a run stands by the record of its newest attempt, in words."""
    attempt = f"attempt {newest.attempt.name} on {newest.attempt.host}"
    why = f": {newest.why}" if newest.why else ""
    left = f"; {newest.attempt.left}" if newest.attempt.left else ""
    if newest.alive:
        return f"running, {attempt}, seen {time.time() - newest.seen_unix_s:.0f} s ago{left}"
    if newest.attempt.code == 0:
        return f"finished, {attempt}"
    if newest.final is not None:
        return f"failed for good{why}"
    return f"{attempt} {_end_of(newest)}{left}"


def run(arguments: Sequence[str] | None = None) -> None:
    """The command line. Raises ConfigError, StorageError."""
    parser = argparse.ArgumentParser(prog="python -m trainer.observe.mirror", description=__doc__)
    parser.add_argument("command", choices=("pull", "logs", "profile", "runs"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument(
        "--every", type=float, default=0.0, help="pull again every so many seconds until the end"
    )
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--fetch", action="store_true")
    args = parser.parse_args(arguments)
    if args.command == "runs":
        print("\n".join(run_lines(args.url)))
        return
    mirror = RunMirror(args.url, args.folder)
    if args.command == "profile":
        print(mirror.profiles() if args.fetch else mirror.request_profile())
        return
    if args.command == "logs":
        show_log(mirror, args.follow, args.every or 10.0)
        return
    while not run_has_ended(mirror, mirror.update()) and args.every:
        time.sleep(args.every)
    mirror.gpu_check()
    if args.weights:
        print(f"weights: {mirror.weights()}")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
