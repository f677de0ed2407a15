"""`bundle RUN`: what a maintainer needs after a failure, without secrets, as one file.

Only files of the list below are taken, and none that holds rows or completions. Each is read as text, and
what is or looks like a secret is replaced; a text that still holds one afterwards ends the command.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.drivers import fetched_runs, launch_tokens
from recipes.records import manifest, run_record
from recipes.records.run_record import PULLED
from trainer.config import ConfigError
from trainer.config.run_folder import (
    ATTEMPTS,
    CONFIG,
    LAUNCH,
    MANIFEST,
    METRICS,
    NODES,
    PROGRESS,
    ROSTER,
)
from trainer.system.redaction import LEAST_REMOVED, SECRET_NAME, secret_cleaner, secret_in_text

WHOLE = (CONFIG, LAUNCH, MANIFEST, PROGRESS, ATTEMPTS, ROSTER, "preflight.json", "gpu-check.json", "refused")
"""Files that are taken as they are."""
ENDS = (METRICS, NODES)
"""Files of which the last lines are taken."""
PATTERNS = ("*.log", "*.out", "*.err", "logs/**/*", "hang-*/*", "post-mortem*/*", "task/*")
"""Logs of all nodes, stacks of processes that hung or died, and rendered task files."""
TAIL_BYTES = 256 << 10
"""Taken from the end of each file."""


@dataclass(frozen=True)
class BundlePart:
    """One file of a bundle."""

    name: str
    text: str
    removed: int
    """Secrets that were replaced in it."""


def bundle(run: str, bucket: str, out: str, dry_run: bool) -> int:
    """Lists what the bundle holds, then writes it for you alone. Raises ConfigError."""
    parts = collect_parts(run, folders_of(run, bucket))
    if not parts:
        raise ConfigError(
            f"nothing of {run} is here: give its id or folder, and --bucket for one of another desk"
        )
    name = Path(run).name
    path = (
        Path(out) if out else (Path(run) if "/" in run else run_record.RUNS / run) / f"{name}-bundle.tar.gz"
    )
    for part in parts:
        replaced = f", {part.removed} secrets removed" if part.removed else ""
        print(f"{len(part.text.encode()):>10,} {part.name}{replaced}")
    if dry_run:
        print(f"# --- would write {path}")
        return 0
    write_bundle(path, parts)
    print(
        f"{path} has these {len(parts)} files. Rows and completions are not among them, but logs may quote"
        " some:"
    )
    print(f"  tar -xzOf {path} | less    shows all of it")
    return 0


def folders_of(run: str, bucket: str) -> list[Path]:
    """The folders with a run's files: the desk's record and what its bucket has."""
    if "/" in run:
        return [Path(run)]
    run_record.check_run_id(run)
    record = run_record.RUNS / run
    try:
        found = fetched_runs.run_files(run, bucket)
    except (ConfigError, SystemExit) as error:  # a run that failed before it wrote anything has a record
        print(f"only the record of this desk is taken: {error}", file=sys.stderr, flush=True)
        found = record / PULLED
    return list(dict.fromkeys([record, found]))


def collect_parts(run: str, folders: list[Path]) -> list[BundlePart]:
    """The parts of a bundle, each without secrets. Raises ConfigError where one cannot be freed of them."""
    clean = secret_cleaner(known_secrets(folders))
    parts = [BundlePart("versions.json", *clean(json.dumps(versions(), indent=1)))]
    for folder in folders:
        inside = "pulled/" if folder.name == PULLED else ""
        paths = [folder / name for name in (*WHOLE, *ENDS)]
        for pattern in PATTERNS:
            paths += sorted(folder.glob(pattern))
        for path in dict.fromkeys(paths):
            if path.is_file() and not path.is_symlink():
                text = without_changes(_tail(path)) if path.name == MANIFEST else _tail(path)
                parts.append(BundlePart(inside + path.relative_to(folder).as_posix(), *clean(text)))
    for part in parts:
        what = secret_in_text(part.text.encode(), {})
        if what:
            raise ConfigError(f"{part.name} holds {what} that could not be taken out: no bundle is written")
    return parts if len(parts) > 1 else []


def known_secrets(folders: list[Path]) -> dict[str, str]:
    """Every secret that this desk knows, by its name."""
    found = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    found |= launch_tokens.find_tokens()
    for folder in folders:
        for path in (*folder.glob("*.key"), folder / "tokens"):
            if path.is_file():
                found[path.name] = path.read_text().strip()
    return {name: value.strip() for name, value in found.items() if len(value.strip()) >= LEAST_REMOVED}


def without_changes(text: str) -> str:
    """A manifest without the changes of the tree, which may hold anything."""
    try:
        data = json.loads(text)
        for name in ("diff", "untracked_diff"):
            if data.get("launch", {}).get(name):
                data["launch"][name] = f"{len(data['launch'][name])} characters, left out"
        return json.dumps(data, indent=1)
    except (ValueError, AttributeError):
        return "not a manifest, or longer than what is taken: left out\n"


def versions() -> dict[str, object]:
    """What the desk runs: commit, Python, system, hashes of the locked requirements."""
    return {
        "source": manifest.source_id(),
        "locks": manifest.lock_hashes(),
        "python": sys.version,
        "system": platform.platform(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _tail(path: Path) -> str:
    """The end of a file, from the start of a line; a manifest whole."""
    size = path.stat().st_size
    most = size if path.name == MANIFEST else TAIL_BYTES
    with path.open("rb") as file:
        file.seek(max(0, size - most))
        data = file.read()
    if size > most:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def write_bundle(path: Path, parts: list[BundlePart]) -> None:
    """Writes the bundle, for its owner alone. Raises ConfigError where there is a file of that name."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: give another name with --out") from None
    with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for part in parts:
            data = part.text.encode()
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{part.name}")
            entry.size = len(data)
            entry.mtime = int(time.time())
            archive.addfile(entry, io.BytesIO(data))
