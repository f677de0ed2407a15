"""What of this machine a launch on rented ones needs: a platform's program, and a key. It imports next to
nothing, since `list` looks at each call."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

KEYS = {
    "runpod": ("", "~/.runpod/config.toml"),
    "gcp": ("GOOGLE_APPLICATION_CREDENTIALS", "~/.config/gcloud/application_default_credentials.json"),
    "aws": ("AWS_ACCESS_KEY_ID", "~/.aws/credentials"),
    "azure": ("", "~/.azure/azureProfile.json"),
    "lambda": ("", "~/.lambda_cloud/lambda_keys"),
    "nebius": ("", "~/.nebius"),
    "kubernetes": ("KUBECONFIG", "~/.kube/config"),
}
"""Cloud -> the variable or the file in which SkyPilot 0.14.1 finds its key."""
DSTACK = ("", "~/.dstack/config.yml")
"""The same of dstack, whose server has the clouds' keys."""
LAUNCH_BIN = Path(".venvs/launch/bin")


def missing(program: str, cloud: str) -> str:
    """What a launch by `sky` or `dstack` on a cloud lacks here, the program or its key; "" if nothing."""
    lacks = []
    if not (shutil.which(program) or (LAUNCH_BIN / program).is_file()):
        lacks.append(program)
    variable, file = DSTACK if program == "dstack" else KEYS.get(cloud, ("", ""))
    if file and not os.environ.get(variable) and not Path(file).expanduser().exists():
        lacks.append(f"a key in {file}")
    return " and ".join(lacks)


def desk_state() -> list[str]:
    """All of it, one entry for each that is asked for."""
    return [missing("dstack", ""), *(missing("sky", cloud) for cloud in KEYS)]
