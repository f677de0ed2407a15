"""Where Ray's dashboard of a run is, for `launch.py dashboard`: a file in the home directory on the head.

The token opens the cluster. So it lies beside the user's keys with mode 600, never in the run's folder or the
bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FOLDER = ".cache/spotrl"
"""Under the home directory."""


def publish(run_id: str, url: str, token_path: str) -> str:
    """Writes address and token of a run's dashboard, if the home can be written; returns the line to show."""
    with contextlib.suppress(OSError):
        path = _path(run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"url": url, "token": Path(token_path).read_text()}, file)
    return f"dashboard {url}  (RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_path})"


def withdraw(run_id: str) -> None:
    """Removes the file, once the cluster is gone."""
    with contextlib.suppress(OSError):
        _path(run_id).unlink(missing_ok=True)


def _path(run_id: str) -> Path:
    return Path.home() / FOLDER / f"{run_id}.json"
