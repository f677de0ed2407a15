"""`reproduce MANIFEST`: the same run again from its manifest, or one line that names what differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.records import manifest, run_record
from trainer.config import ConfigError

TREES = Path(".cache/reproduce")


def reproduce(path: Path, run_id: str, target: str | None, bucket: str, hosts: str, dry_run: bool) -> int:
    """Makes a worktree of the manifest's commit and diff, checks it, and launches the recipe from there."""
    launch = read_launch_half(path)
    run_id = run_record.check_run_id(run_id or run_record.new_run_id(launch["recipe"]))
    tree = worktree(launch)
    check_locks(launch, tree)
    check_config(launch, tree)
    command = [sys.executable, "launch.py", "up", launch["recipe"], "--target", target or launch["target"]]
    for assignment in launch["overrides"]:
        command += ["--set", assignment]
    command += ["--run-id", run_id] + (["--bucket", bucket] if bucket else [])
    command += ["--hosts", hosts] if hosts else []
    command += ["--dry-run"] if dry_run else []
    print(f"{launch['commit'][:12]} with its diff and locks stands in {tree}", flush=True)
    return subprocess.run(command, cwd=tree).returncode


def read_launch_half(path: Path) -> dict[str, Any]:
    """The launch half of a manifest, given as the file or the folder of its run. Raises ConfigError where it
    cannot be reproduced from."""
    if path.is_dir():
        path = path / "manifest.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no manifest at {path}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not a manifest: {error}") from None
    if data.get("format") != manifest.FORMAT:
        raise ConfigError(f"{path} has format {data.get('format')}, and this version reads {manifest.FORMAT}")
    if "launch" not in data:
        source = data.get("run", {}).get("source", "an unknown commit")
        raise ConfigError(
            f"{path} holds only what the node knew ({source}): give the manifest.json of the launching"
            " machine"
        )
    launch = data["launch"]
    if launch["diff"] is None:
        raise ConfigError(
            f"{path} was launched from a changed tree, and its changes stayed there: "
            f"give the manifest.json of {launch.get('record', {}).get('desk') or 'the launching machine'}"
        )
    check_run_half(launch, data.get("run"))
    return launch


def check_run_half(launch: dict[str, Any], run: dict[str, Any] | None) -> None:
    """Raises ConfigError where the node ran something else than was launched."""
    if not run or not run.get("source"):
        return
    expected = manifest.source_of(launch["commit"], launch["diff"], launch.get("untracked", {}))
    if run["source"] != expected:
        raise ConfigError(
            f"the node ran {run['source']}, and {expected} was launched: the two halves are of different runs"
        )
    wrong = [name for name, digest in launch["locks"].items() if run["locks"].get(name, digest) != digest]
    if wrong:
        raise ConfigError(f"the node had other locked requirements than were launched: {', '.join(wrong)}")


def worktree(launch: dict[str, Any]) -> Path:
    """A checkout of the commit with the diff applied, beside this one. Raises ConfigError."""
    commit = launch["commit"]
    if not commit:
        raise ConfigError("the run was launched without git: there is no commit to go back to")
    if not manifest.run_git("cat-file", "-t", commit).strip():
        raise ConfigError(f"commit {commit} is not in this repository: fetch it first")
    tree = (TREES / commit[:12]).absolute()
    if tree.exists():
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=False, capture_output=True)
        shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "worktree", "prune"], check=True)
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], check=True)
    if patch := launch["diff"] + launch.get("untracked_diff", ""):
        done = subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tree, capture_output=True)
        if done.returncode:
            raise ConfigError(
                f"the manifest's diff does not apply to {commit[:12]}: {done.stderr.strip().splitlines()[0]}"
            )
    put_untracked(launch, tree)
    for name in (".venvs", ".cache"):  # environments are keyed by their lock: sharing them is safe
        here = Path(name).absolute()
        if here.exists() and not (tree / name).exists():
            (tree / name).symlink_to(here)
    return tree


def put_untracked(launch: dict[str, Any], tree: Path) -> None:
    """Copies the run's untracked files from here, where they are what they were. Raises ConfigError naming
    those that are not."""
    if launch.get("untracked_diff"):
        return
    here = manifest.untracked_hashes()
    kept = launch.get("untracked", {})
    missing = [name for name, digest in kept.items() if not digest or here.get(name) != digest]
    if missing:
        raise ConfigError(
            f"the run was launched with files that git did not know, and {', '.join(missing[:4])} of them are"
            " not here as they were: put them back (the manifest has their sha256); `up --keep-untracked`"
            " keeps their contents"
        )
    for name in kept:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, tree / name, follow_symlinks=False)


def check_locks(launch: dict[str, Any], tree: Path) -> None:
    """Raises ConfigError naming the requirement files that differ."""
    now = manifest.lock_hashes(tree)
    wrong = sorted(
        name for name in launch["locks"].keys() | now.keys() if launch["locks"].get(name) != now.get(name)
    )
    if wrong:
        raise ConfigError(f"locked requirements differ from the manifest's: {', '.join(wrong)}")


def check_config(launch: dict[str, Any], tree: Path) -> None:
    """Raises ConfigError naming the configuration keys that the recipe resolves to otherwise in that tree."""
    script = (
        "import json, sys; from recipes.presets import resolve; from trainer.config import to_dict;"
        "a = json.load(sys.stdin); print(json.dumps(to_dict(resolve(a[0], a[1]).config)))"
    )
    given = json.dumps([launch["recipe"], launch["overrides"]])
    done = subprocess.run(
        [sys.executable, "-c", script], input=given, text=True, cwd=tree, capture_output=True
    )
    if done.returncode:
        raise ConfigError(
            f"the recipe does not resolve at that commit: {done.stderr.strip().splitlines()[-1]}"
        )
    wrong = differing_keys(launch["config"], json.loads(done.stdout))
    if wrong:
        raise ConfigError(
            f"the recipe resolves to another configuration than the manifest's: {', '.join(wrong[:6])}"
        )


def differing_keys(a: dict[str, Any], b: dict[str, Any], where: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    found = []
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += differing_keys(x, y, f"{where}{key}.")
        elif x != y:
            found.append(f"{where}{key}")
    return found
