"""`python requirements/lock.py` writes the hashed requirement files from pyproject.toml; none names an index.

Of each package the hashes of those files alone are kept that a node can take (Linux on x86-64, Python 3.11 and 3.12):
a tenth of all. dstack uploads a repository of 2 MB at most.
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = {
    "cpu": ["train", "cpu"],
    "test": ["train", "cpu", "test"],
    "gpu": ["train", "gpu"],
    "launch": ["launch"],
}
WHEEL = re.compile(r"-([^-]+)-([^-]+)-([^-]+)\.whl$")
"""Tags of Python, ABI and platform."""


def fits(file: str) -> bool:
    """Whether a node can take this wheel."""
    python, abi, platform = WHEEL.search(file).groups()  # ty: ignore[unresolved-attribute]
    ours = re.search(r"py3|cp31[12]\b", python) or (python.startswith("cp3") and abi == "abi3")
    return bool(ours and re.search(r"any$|manylinux\S*x86_64|^linux_x86_64", platform))


def kept(packages: list[dict]) -> set[str]:
    """SHA-256 of every file that a node can take; of a package without such a wheel, of its source."""
    hashes: set[str] = set()
    for package in packages:
        wheels = package.get("wheels", [])
        names = [wheel.get("name") or wheel["url"].rsplit("/", 1)[-1] for wheel in wheels]
        own = [wheel for wheel, name in zip(wheels, names, strict=True) if fits(name)]
        hashes |= {file["hashes"]["sha256"] for file in own or [package["sdist"]]}
    return hashes


def lock(name: str, extras: list[str]) -> None:
    """Writes one requirement file."""
    out = HERE / f"{name}.txt"
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--generate-hashes", "--no-emit-index-url"]
    command += ["--override", "requirements/overrides.txt", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--custom-compile-command", "python requirements/lock.py"]
    command += [f"--extra={extra}" for extra in extras]
    if name == "test":
        command += ["--constraint", "requirements/cpu.txt"]
    subprocess.run([*command, "-o", str(out)], check=True, cwd=HERE.parent)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "pylock.toml"
        subprocess.run([*command, "--constraint", str(out), "-o", str(files)], check=True, cwd=HERE.parent)
        wanted = kept(tomllib.loads(files.read_text())["packages"])
    entries = re.split(r"(?m)^(?=\S)", out.read_text())
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
