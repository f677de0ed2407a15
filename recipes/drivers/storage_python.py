"""The Python that talks to object stores from the desk: of an environment that is here, else of a small new
one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from trainer.config import ConfigError


def find_python() -> str:
    """Its path. Raises ConfigError where the environment cannot be made."""
    known = (Path(f".venvs/{name}") for name in ("desk", "cpu", "test"))
    python = next((venv / "bin/python" for venv in known if (venv / ".stamp").exists()), None)
    if not python:
        if subprocess.run(["bash", "trainer/shell/setup.sh", "desk"]).returncode:
            raise ConfigError(
                "the environment that talks to the bucket could not be made: the lines above say why"
            )
        python = Path(".venvs/desk/bin/python")
    return str(python)
