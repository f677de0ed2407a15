"""Which files of an environment two wheels own with different contents: the last one that uv writes wins.

`python requirements/owners.py` installs each lock into a folder of its own (from uv's cache where it is
there), reads the wheels' RECORDs, and writes `requirements/owners.json`: per lock the hash of its pins and
the files that two packages own with different contents. requirements/lock.py ends with this, and
tests/test_locks.py holds that the file is of the present locks and names no harmful file.
"""

import csv
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
DIGEST = HERE / "owners.json"
LOCKS = ("cpu", "test", "gpu", "launch")
"""Environments desk and rocm take a part of the gpu lock, so they share no file that it does not share."""

BENIGN = {
    "build_backend.py": "two packages' own build script; nothing imports it from an environment",
}
"""Shared files with different contents that do no harm, by path, with the reason."""


def pins(lock: str) -> dict[str, str]:
    """Version of each package that a lock's text installs, by name."""
    return dict(re.findall(r"(?m)^([a-z0-9.-]+)(?:\[[a-z,_0-9-]+\])?==([^\s;\\]+)", lock))


def key(lock: str) -> str:
    """Hash of a lock's pins."""
    lines = sorted(f"{name}=={version}" for name, version in pins(lock).items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def records(site_packages: Path) -> dict[str, dict[str, str]]:
    """Hash of each file that an installed wheel brought, by path and then by `name==version`."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for record in site_packages.glob("*.dist-info/RECORD"):
        name, _, version = record.parent.name.removesuffix(".dist-info").rpartition("-")
        package = re.sub(r"[-_.]+", "-", name).lower() + "==" + version
        with record.open(newline="") as lines:
            for path, hashed, *_ in csv.reader(lines):
                if hashed:
                    owners[path][package] = hashed
    return owners


def shared(owners: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Files with owners that disagree about the contents, with these owners."""
    differ = {path: by for path, by in owners.items() if len(set(by.values())) > 1}
    return {path: sorted(by) for path, by in sorted(differ.items())}


def site_packages(environment: Path) -> Path:
    """Where an environment's wheels lie."""
    return next(environment.glob("lib/python3*/site-packages"))


def read_lock(name: str) -> dict:
    """The digest of one lock, whose wheels are put into a temporary environment by links to uv's cache."""
    lock = HERE / f"{name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", "3.11", folder], check=True)
        install = ["uv", "pip", "sync", "--quiet", "--link-mode", "symlink", "--require-hashes"]
        subprocess.run([*install, "--python", python, str(lock)], check=True)
        owners = records(site_packages(Path(folder)))
    return {"pins": key(lock.read_text()), "files": len(owners), "shared": shared(owners)}


def write() -> None:
    """Brings the digest up to date; a lock whose pins are those of the digest is not installed again."""
    known = json.loads(DIGEST.read_text()) if DIGEST.exists() else {}
    for name in LOCKS:
        if known.get(name, {}).get("pins") != key((HERE / f"{name}.txt").read_text()):
            known[name] = read_lock(name)
        for path in set(known[name]["shared"]) - set(BENIGN):
            print(f"{name}: {path} has two owners: {known[name]['shared'][path]}", file=sys.stderr)
    DIGEST.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    write()
