"""The manifest of a run: what it was made from, so that `reproduce` can make it again or say why it cannot.

Two halves. `launch` is written where the run was launched from: commit and diff, lock hashes, recipe,
overrides, target, resolved configuration. `run` is written on the node when it starts: data fingerprint and
file hashes, lock hashes, hardware and driver. `python -m recipes.manifest CONFIG` writes the second half.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recipes.run_record import RUNS, RunRecord
from recipes.spec import Recipe
from trainer import config as run_config
from trainer.config.run_folder import write_whole

FORMAT = 1
LOCKS = Path("requirements")


def git(*arguments: str, cwd: Path | None = None) -> str:
    """Output of a git command; empty where there is no repository or no git."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=cwd).stdout
    except (subprocess.CalledProcessError, FileNotFoundError):
        return ""


def dirty_files() -> list[str]:
    """Files that differ from the commit, untracked ones included."""
    return [line[3:] for line in git("status", "--porcelain").splitlines()]


def diff() -> str:
    """The tree's difference from its commit as a patch, untracked files included."""
    tracked = git("diff", "HEAD", "--binary")
    untracked = git("ls-files", "--others", "--exclude-standard").splitlines()
    return tracked + "".join(_new_file(name) for name in untracked)


def _new_file(name: str) -> str:
    done = subprocess.run(
        ["git", "diff", "--binary", "--no-index", "/dev/null", name], capture_output=True, text=True
    )
    return done.stdout


def source_id() -> str:
    """Commit, and a hash of the diff where the tree is dirty; empty without git."""
    commit = git("rev-parse", "HEAD").strip()
    patch = diff() if commit else ""
    return f"{commit}+{hashlib.sha256(patch.encode()).hexdigest()[:12]}" if patch else commit


def lock_hashes(root: Path = Path(".")) -> dict[str, str]:
    """sha256 of every requirements file."""
    files = sorted((root / LOCKS).glob("*.txt"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_launch(recipe: Recipe, record: RunRecord) -> Path:
    """Writes the first half to runs/RUN_ID/manifest.json and returns its path."""
    data = {
        "format": FORMAT,
        "run_id": record.run_id,
        "launch": {
            "commit": git("rev-parse", "HEAD").strip(),
            "diff": diff(),
            "locks": lock_hashes(),
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
    write_whole(path, f"{json.dumps(data, indent=1)}\n".encode())
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
        "hardware": hardware(),
        "setup": setup(),
    }


def setup() -> dict[str, float]:
    """What the environment's set-up took on this machine: seconds, bytes downloaded; {} where it came
    otherwise."""
    told = Path(sys.prefix) / ".setup.json"
    return json.loads(told.read_text()) if told.is_file() else {}


def data_facts(path: str) -> dict[str, Any]:
    """Name, revision, fingerprint and file hashes of a prepared dataset that is on this machine."""
    manifest = Path(path) / "manifest.json"
    if "://" in path or not manifest.is_file():
        return {"path": path}
    known = json.loads(manifest.read_text())
    files = {entry["path"]: entry["sha256"] for entry in known.get("files", [])}
    return {key: known.get(key, "") for key in ("name", "revision", "fingerprint")} | {"files": files}


def hardware() -> dict[str, Any]:
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
    write_whole(out, f"{json.dumps(known, indent=1)}\n".encode())  # nodes may share the directory
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
