"""`reproduce MANIFEST`: the same run again from its manifest, or one line that names what differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from recipes.records import manifest, run_record
from recipes.records.run_record import Option
from recipes.records.trust import ask_trust
from trainer.config import ConfigError
from trainer.system.records import Line, MalformedRecord, Name, convert_record, decode_record
from trainer.system.terminal_text import terminal_line

TREES = Path(".cache/reproduce")
MOST_BYTES = 256 << 20
"""The largest manifest that is read: the changes of a tree stand in it."""

Relative = Annotated[
    str, Meta(pattern=r"^(?!/)(?!(.*/)?\.\.(/|\Z))[^\x00-\x1f\x7f-\x9f]+\Z", max_length=1024)
]
"""A path that leads out of no folder."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]


class RunHalf(Struct):
    """What is read of the second half."""

    source: Line = ""
    locks: dict[Name, Sha256] = {}


class LaunchHalf(Struct):
    """What is read of a manifest's first half."""

    commit: Annotated[str, Meta(pattern=r"^([0-9a-f]{40,64})?\Z")]
    diff: str | None
    locks: dict[Name, Sha256]
    recipe: Line
    overrides: list[Option]
    target: Name
    config: dict[str, Any]
    untracked: dict[Relative, Sha256] = {}
    record: dict[str, Any] = {}


def reproduce(
    path: Path, run_id: str, target: str | None, bucket: str, hosts: str, dry_run: bool, trust: bool = False
) -> int:
    """Makes a worktree of the manifest's commit and diff, checks it, and launches the recipe from there."""
    launch = read_launch_half(path)
    if not (trust or _is_of_this_desk(path)):
        _ask_trust(path, launch)
    run_id = run_record.check_run_id(run_id or run_record.new_run_id(launch.recipe))
    tree = worktree(launch)
    check_locks(launch, tree)
    check_config(launch, tree)
    command = [sys.executable, "launch.py", "up", launch.recipe, "--target", target or launch.target]
    for assignment in launch.overrides:
        command += ["--set", assignment]
    command += ["--run-id", run_id] + (["--bucket", bucket] if bucket else [])
    command += ["--hosts", hosts] if hosts else []
    command += ["--dry-run"] if dry_run else []
    print(f"{launch.commit[:12]} with its diff and locks stands in {tree}", flush=True)
    return subprocess.run(command, cwd=tree).returncode


def _is_of_this_desk(path: Path) -> bool:
    """Whether a manifest lies where this desk has written it."""
    folder = path if path.is_dir() else path.parent
    return folder.resolve().parent == run_record.RUNS.resolve() and run_record.is_known(folder.name)


def _ask_trust(path: Path, launch: LaunchHalf) -> None:
    """Shows what a manifest from elsewhere would have this desk run, and asks. Raises ConfigError without a
    yes."""
    patch = launch.diff or ""
    files = [line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ ")]
    lines = [f"recipe {launch.recipe}"]
    lines += [f"option {option}" for option in launch.overrides]
    lines += [f"changed file {name}" for name in files]
    ask_trust(f"{path} says of its run:", lines, "whoever wrote the file", str(path))


def read_launch_half(path: Path) -> LaunchHalf:
    """The launch half of a manifest, given as the file or the folder of its run. Raises ConfigError where it
    cannot be reproduced from."""
    if path.is_dir():
        path = path / "manifest.json"
    try:
        data = decode_record(path.read_bytes(), dict, str(path), MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"no manifest at {path}") from None
    except MalformedRecord as error:
        raise ConfigError(str(error)) from None
    if data.get("format") != manifest.FORMAT:
        raise ConfigError(f"{path} has format {data.get('format')}, and this version reads {manifest.FORMAT}")
    if "launch" not in data:
        run = data.get("run")
        source = run.get("source", "") if isinstance(run, dict) else ""
        raise ConfigError(
            f"{path} holds only what the node knew ({terminal_line(source)}): give the manifest.json of the"
            " launching machine"
        )
    try:
        launch = convert_record(data["launch"], LaunchHalf, f"the launch in {path}")
        run = convert_record(data["run"], RunHalf, f"the run in {path}") if data.get("run") else None
    except MalformedRecord as error:
        raise ConfigError(str(error)) from None
    if launch.diff is None:
        raise ConfigError(
            f"{path} was launched from a changed tree, and its changes stayed there: "
            f"give the manifest.json of {launch.record.get('desk') or 'the launching machine'}"
        )
    if run is not None:
        check_run_half(launch, run)
    return launch


def check_run_half(launch: LaunchHalf, run: RunHalf) -> None:
    """Raises ConfigError where the node ran something else than was launched."""
    if not run.source:
        return
    expected = manifest.source_of(launch.commit, launch.diff or "", launch.untracked)
    if run.source != expected:
        raise ConfigError(
            f"the node ran {run.source}, and {expected} was launched: the two halves are of different runs"
        )
    wrong = [name for name, digest in launch.locks.items() if run.locks.get(name, digest) != digest]
    if wrong:
        raise ConfigError(f"the node had other locked requirements than were launched: {', '.join(wrong)}")


def worktree(launch: LaunchHalf) -> Path:
    """A checkout of the commit with the diff applied, beside this one. Raises ConfigError."""
    commit = launch.commit
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
    if launch.diff:
        done = subprocess.run(
            ["git", "apply", "-"], input=launch.diff, text=True, cwd=tree, capture_output=True
        )
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


def put_untracked(launch: LaunchHalf, tree: Path) -> None:
    """Copies the run's untracked files from here, where they are what they were. Raises ConfigError naming
    those that are not."""
    here = manifest.untracked_hashes()
    kept = launch.untracked
    missing = [name for name, digest in kept.items() if not digest or here.get(name) != digest]
    if missing:
        raise ConfigError(
            f"the run was launched with files that git did not know, and {', '.join(missing[:4])} of them are"
            " not here as they were: put them back (the manifest has their sha256)"
        )
    for name in kept:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, tree / name, follow_symlinks=False)


def check_locks(launch: LaunchHalf, tree: Path) -> None:
    """Raises ConfigError naming the requirement files that differ."""
    now = manifest.lock_hashes(tree)
    wrong = sorted(
        name for name in launch.locks.keys() | now.keys() if launch.locks.get(name) != now.get(name)
    )
    if wrong:
        raise ConfigError(f"locked requirements differ from the manifest's: {', '.join(wrong)}")


def check_config(launch: LaunchHalf, tree: Path) -> None:
    """Raises ConfigError naming the configuration keys that the recipe resolves to otherwise in that tree."""
    script = (
        "import json, sys; from recipes.presets import resolve; from trainer.config import to_dict;"
        "a = json.load(sys.stdin); print(json.dumps(to_dict(resolve(a[0], a[1]).config)))"
    )
    given = json.dumps([launch.recipe, launch.overrides])
    done = subprocess.run(
        [sys.executable, "-c", script], input=given, text=True, cwd=tree, capture_output=True
    )
    if done.returncode:
        raise ConfigError(
            f"the recipe does not resolve at that commit: {done.stderr.strip().splitlines()[-1]}"
        )
    wrong = differing_keys(launch.config, json.loads(done.stdout))
    if wrong:
        raise ConfigError(
            f"the recipe resolves to another configuration than the manifest's: {', '.join(wrong[:6])}"
        )


def differing_keys(a: dict[str, Any], b: dict[str, Any], where: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    differing = []
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            differing += differing_keys(x, y, f"{where}{key}.")
        elif x != y:
            differing.append(f"{where}{key}")
    return differing
