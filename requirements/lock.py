"""`python requirements/lock.py` writes the hashed requirement files from pyproject.toml; none names an index."""

import gzip
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = {
    "cpu": ["train", "cpu"],
    "test": ["train", "cpu", "test"],
    "gpu": ["train", "gpu"],
    "launch": ["launch"],
}

if __name__ == "__main__":
    for name, extras in LOCKS.items():
        command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--generate-hashes", "--no-emit-index-url"]
        command += ["--override", "requirements/overrides.txt", "--python-version", "3.11"]
        command += [
            "--python-platform",
            "x86_64-manylinux_2_28",
            "--custom-compile-command",
            "python requirements/lock.py",
        ]
        command += [f"--extra={extra}" for extra in extras] + ["-o", f"requirements/{name}.txt"]
        if name == "test":
            command += ["--constraint", "requirements/cpu.txt"]
        subprocess.run(command, check=True, cwd=HERE.parent)
        print(f"requirements/{name}.txt")
    packed = gzip.compress((HERE / "gpu.txt").read_bytes(), 9, mtime=0)  # dstack uploads it: .dstackignore
    (HERE / "gpu.txt.gz").write_bytes(packed)
