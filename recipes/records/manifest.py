"""The manifest of a run: what it was made from, so that `reproduce` can make it again or say why it cannot.

Two halves. `launch` is written where the run was launched from: commit and diff, lock hashes, recipe,
overrides, target, resolved configuration. `run` is written on the node when it starts: data fingerprint and
file hashes, lock hashes, hardware and driver. `python -m recipes.records.manifest CONFIG` writes the second
half."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from recipes.recipe.spec import Recipe
from recipes.records.run_record import RUNS, RunRecord
from trainer import config as run_config
from trainer.config.never_sent import is_secret
from trainer.config.run_folder import write_whole

FORMAT = 1
LOCKS = Path("requirements")


def run_git(*arguments: str, cwd: Path | None = None) -> str:
    """Output of a git command; empty where there is no repository or no git."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=cwd).stdout
    except (subprocess.CalledProcessError, FileNotFoundError):
        return ""


def dirty_files() -> list[str]:
    """Files that differ from the commit, untracked ones included."""
    return changed_files() + untracked_files()


def tracked_diff() -> str:
    """The difference of the tracked files from their commit as a patch, without those that may hold a
    secret."""
    names = [name for name in changed_files() if not is_secret(name)]
    return run_git("diff", "HEAD", "--binary", "--no-renames", "--", *names) if names else ""


def changed_files() -> list[str]:
    """Tracked files that differ from the commit."""
    return _listed("diff", "HEAD", "--name-only", "--no-renames", "--relative")


def untracked_files() -> list[str]:
    """Files that git neither knows nor ignores; a name that ends with a slash is a repository of its own."""
    return _listed("ls-files", "--others", "--exclude-standard")


def untracked_hashes() -> dict[str, str]:
    """sha256 of every file that git neither knows nor ignores, without those that may hold a secret; "" for
    what is no file."""
    return {name: _digest(Path(name)) for name in untracked_files() if not is_secret(name)}


def _listed(*arguments: str) -> list[str]:
    return [name for name in run_git(*arguments, "-z").split("\0") if name]


def _digest(path: Path) -> str:
    if path.is_symlink():
        return hashlib.sha256(os.readlink(path).encode()).hexdigest()
    if not path.is_file():
        return ""
    state = path.stat()
    return _file_digest(path.absolute(), state.st_size, state.st_mtime_ns)


@cache
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    """sha256 of a file of this size and time: a launch asks twice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_id() -> str:
    """Commit, and a hash of what differs from it where the tree is dirty; empty without git."""
    commit = run_git("rev-parse", "HEAD").strip()
    return source_of(commit, tracked_diff(), untracked_hashes()) if commit else ""


def source_of(commit: str, patch: str, others: Mapping[str, str]) -> str:
    """The id of a source: its commit, and a hash of its patch and of its untracked files where there are
    some. others: sha256 of each untracked file."""
    lines = [f"{digest} {name}\n" for name, digest in sorted(others.items())]
    changes = patch + "".join(lines)
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:12]}" if changes else commit


def own_code(config: run_config.RunConfig) -> list[tuple[str, str]]:
    """The options that name code of the run's own, with what they name: `path/to/file.py:name`."""
    named = [("rewards.function", function.path) for function in config.rewards.own]
    return named + ([("turns.environment", config.turns.environment)] if config.turns.own else [])


def code_hashes(config: run_config.RunConfig) -> dict[str, str]:
    """sha256 of the files of the run's own code that are on this machine, and of the Python files beside
    each, which it can import."""
    digests = {}
    for _, spec in own_code(config):
        file = Path(spec.rpartition(":")[0]).expanduser()
        if file.is_file():
            for path in {file, *file.parent.glob("*.py"), *file.parent.glob("*/*.py")}:
                digests[str(path)] = _digest(path)
    return dict(sorted(digests.items()))


def is_ignored(name: str) -> bool:
    """Whether git leaves a file out."""
    return bool(run_git("check-ignore", "--", name))


def lock_hashes(root: Path = Path(".")) -> dict[str, str]:
    """sha256 of every requirements file."""
    files = sorted((root / LOCKS).glob("*.txt"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_launch(recipe: Recipe, record: RunRecord) -> Path:
    """Writes the first half to runs/RUN_ID/manifest.json, for you alone, and returns its path."""
    data = {
        "format": FORMAT,
        "run_id": record.run_id,
        "launch": {
            "commit": run_git("rev-parse", "HEAD").strip(),
            "diff": tracked_diff(),
            "untracked": untracked_hashes(),
            "locks": lock_hashes(),
            "code": code_hashes(recipe.config),
            "recipe": record.recipe,
            "overrides": record.overrides,
            "target": record.target,
            "image": recipe.cluster.image,
            "cluster": json.loads(json.dumps(dataclasses.asdict(recipe.cluster))),
            "config": run_config.to_dict(recipe.config),
            "fingerprint": run_config.fingerprint(recipe.config),
        },
    }
    path = RUNS / record.run_id / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(data, indent=1)}\n".encode(), private=True)
    return path


# --- on the node --------------------------------------------------------------------------------------------


def run_half(config: run_config.RunConfig) -> dict[str, Any]:
    """The second half: what only the node knows."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "source": os.environ.get("SPOTRL_SOURCE") or source_id(),
        "locks": lock_hashes(),
        "seed": config.run.seed,
        "config": run_config.to_dict(config),
        "fingerprint": run_config.fingerprint(config),
        "data": data_facts(config.data.path),
        "hardware": hardware_facts(),
    }


def data_facts(path: str) -> dict[str, Any]:
    """Name, revision, fingerprint and file hashes of a prepared dataset that is on this machine."""
    manifest = Path(path) / "manifest.json"
    if "://" in path or not manifest.is_file():
        return {"path": path}
    known = json.loads(manifest.read_text())
    files = {entry["path"]: entry["sha256"] for entry in known.get("files", [])}
    return {key: known.get(key, "") for key in ("name", "revision", "fingerprint")} | {"files": files}


def hardware_facts() -> dict[str, Any]:
    """Machine, kernel, CPU count, and the GPUs as the driver names them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    return {"machine": platform.machine(), "kernel": platform.release(), "cpus": os.cpu_count(), "gpus": gpus}


def main(path: str) -> int:
    """Adds the second half to the run's manifest.json, and keeps the first if it is there."""
    config = run_config.load(path)
    out = Path(config.run.dir) / "manifest.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"format": FORMAT, "run_id": config.run_id}
    if out.exists():
        known |= json.loads(out.read_text())
    known["run"] = known.get("run") or run_half(config)
    # Nodes may share the directory. The first half may hold what only its owner should read.
    write_whole(out, f"{json.dumps(known, indent=1)}\n".encode(), private=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
