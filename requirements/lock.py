"""`python requirements/lock.py` writes the hashed requirement files from pyproject.toml; none names an index.

Of each package the hashes of those files alone are kept that a node can take (Linux on x86-64, Python 3.11
and 3.12): a tenth of all. dstack uploads a repository of 2 MB at most. requirements/owners.json follows the
locks (requirements/owners.py).
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

import owners

HERE = Path(__file__).parent
LOCKS = {
    "cpu": ["train", "cpu"],
    "test": ["train", "cpu", "test"],
    "gpu": ["train", "gpu"],
    "launch": ["launch"],
}


def compiled(extras: list[str], python: str, platform: str, out: Path, constraints: list[str]) -> None:
    """uv's resolution of some extras as a file of the kind that its name says."""
    command = [
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--quiet",
        "--generate-hashes",
        "--no-emit-index-url",
    ]
    command += ["--override", "requirements/overrides.txt", "--python-version", python]
    command += ["--python-platform", platform, "--custom-compile-command", "python requirements/lock.py"]
    command += [f"--extra={extra}" for extra in extras] + [f"--constraint={path}" for path in constraints]
    subprocess.run([*command, "-o", str(out)], check=True, cwd=HERE.parent)


def lock(name: str, extras: list[str]) -> None:
    """Writes one requirement file; what it had pinned stays where it can."""
    out, wanted = HERE / f"{name}.txt", set()
    with tempfile.TemporaryDirectory() as folder:
        whole, files = Path(folder) / out.name, Path(folder) / "pylock.toml"
        # uv takes over the hashes too that it finds.
        whole.write_text(re.sub(r" \\\n +--hash=\S+", "", out.read_text()) if out.exists() else "")
        constraints = ["requirements/cpu.txt"] if name == "test" else []
        compiled(extras, "3.11", "x86_64-manylinux_2_28", whole, constraints)
        for python in ("3.11", "3.12"):  # a pylock.toml names only what fits
            compiled(extras, python, "x86_64-manylinux_2_40", files, [str(whole)])
            for package in tomllib.loads(files.read_text())["packages"]:
                wanted |= {f["hashes"]["sha256"] for f in package.get("wheels") or [package["sdist"]]}
            files.unlink()
        entries = re.split(r"(?m)^(?=\S)", whole.read_text())
    out.write_text("".join(only(entry, wanted) for entry in entries))
    print(out.relative_to(HERE.parent))


def only(entry: str, wanted: set[str]) -> str:
    """A requirement with the wanted ones of its hashes."""
    head, *rest = re.split(r" \\\n {4}(?=--hash)", entry)
    if not rest:
        return entry
    last, newline, comments = rest[-1].partition("\n")
    hashes = [h for h in (*rest[:-1], last) if h.removeprefix("--hash=sha256:") in wanted]
    assert hashes, f"no file of {head} fits"
    return " \\\n    ".join((head, *hashes)) + newline + comments


if __name__ == "__main__":
    for name, extras in LOCKS.items():
        lock(name, extras)
    owners.write()
