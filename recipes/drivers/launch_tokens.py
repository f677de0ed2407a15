"""Tokens that this machine has for a run: from the environment, else from where each service's own tool keeps
them.

They go into the environment of the platform's program, which is told their names; never on a command line or
in a file. A rented machine has none of these files: what is not found here is missing there, and only once it
is paid for.
"""

from __future__ import annotations

import configparser
import json
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.platforms.script import API_KEY, FLEET_KEY, SECRETS, SETTINGS
from recipes.records import run_record
from trainer.config import ConfigError

AWS_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
R2_NAMES = ("R2_ACCESS_KEY_ID", "R2_SECRET_ACCESS_KEY")
LEAST_KEY = 16
"""Characters that trainer and workers ask of their secret (trainer/fleet/objects.py)."""


def find_tokens() -> dict[str, str]:
    """The values of those of `script.SECRETS` that can be found. Raises ConfigError for a Google key that is
    none."""
    home = Path.home()
    given = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    kept: dict[str, str] = {}
    aws = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials").expanduser()
    r2 = home / ".cloudflare/r2.credentials"
    for names, file, section in (
        (AWS_NAMES, aws, os.environ.get("AWS_PROFILE") or "default"),
        (R2_NAMES, r2, "r2"),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(file if names[0] not in given else ())
        if parser.has_section(section):
            fields = {name: parser[section].get(name.replace("R2_", "AWS_").lower()) for name in names}
            kept |= {name: value for name, value in fields.items() if value}
    if "WANDB_API_KEY" not in given and (login := _login(home / ".netrc", "api.wandb.ai")):
        kept["WANDB_API_KEY"] = login
    token = Path(os.environ.get("HF_HOME") or home / ".cache/huggingface") / "token"
    if "HF_TOKEN" not in given and token.is_file():
        kept["HF_TOKEN"] = token.read_text().strip()
    key = Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or home / ".none")
    if "GOOGLE_SERVICE_ACCOUNT_KEY" not in given and key.is_file():
        text = key.read_text()
        if _google_key(text, f"GOOGLE_APPLICATION_CREDENTIALS names {key}").get("type") == "service_account":
            kept["GOOGLE_SERVICE_ACCOUNT_KEY"] = text
    elif "GOOGLE_SERVICE_ACCOUNT_KEY" in given:
        _google_key(given["GOOGLE_SERVICE_ACCOUNT_KEY"], "GOOGLE_SERVICE_ACCOUNT_KEY is set")
    return {name: (given | kept)[name] for name in SECRETS if name in given or name in kept}


def _google_key(text: str, where: str) -> dict[str, Any]:
    """The JSON of a Google key. Raises ConfigError, which does not show it."""
    path = text.strip()
    if path.startswith(("/", "~", "./")) or (path.endswith(".json") and "{" not in path):
        raise ConfigError(
            f"{where} to the path {path}, and takes the key itself: export"
            f' GOOGLE_SERVICE_ACCOUNT_KEY="$(cat {path})", or unset it and export'
            f" GOOGLE_APPLICATION_CREDENTIALS={path}"
        )
    try:
        key = json.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise ConfigError(
            f"{where}, and that is not the JSON of a key: export"
            ' GOOGLE_SERVICE_ACCOUNT_KEY="$(cat KEY.json)" with the file that Google gave you, or unset it'
        )
    return key


def find_settings() -> dict[str, str]:
    """The values of those of `script.SETTINGS` that can be found."""
    account = Path.home() / ".cloudflare/accountid"
    kept = {"R2_ACCOUNT_ID": account.read_text().strip()} if account.is_file() else {}
    given = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    return kept | given


def api_key(run: str) -> str:
    """The key of a server: yours, the one that it began with, or a new one; kept in the run's record, for you
    alone."""
    return _kept(run_record.RUNS / run / "api.key", os.environ.get(API_KEY, ""))


def fleet_key(run: str, begins: bool) -> str:
    """The secret that a run shares with its rollout workers: the one that it began with, yours, or a new one;
    kept in the run's record, for you alone. begins: it is the run that is launched, and may have a new one.
    Else yours is taken for this launch alone: it may be that of another run. Raises ConfigError where a
    worker's run has none here."""
    path = run_record.RUNS / run / "fleet.key"
    given = os.environ.get(FLEET_KEY, "")
    if begins:
        return _kept(path, given)
    if not (path.exists() or given):
        raise ConfigError(
            f"this machine has not the secret of {run}, by which it knows its workers: export {FLEET_KEY}, "
            f"which is in runs/{run}/fleet.key where the run was launched"
        )
    return path.read_text() if path.exists() else given


def check_resumed(run: str) -> None:
    """Raises ConfigError where this machine has not the secret of a run that is to go on: workers that live
    know it by that one."""
    if (run_record.RUNS / run / "fleet.key").exists() or os.environ.get(FLEET_KEY):
        return
    raise ConfigError(
        f"this machine has not the secret of {run}, by which it and its workers know each other: copy"
        f" runs/{run}/fleet.key from where the run was launched, or export {FLEET_KEY} with what that holds."
        f" Where it is lost, `python3 launch.py down {run}` ends what lives, and export"
        f" {FLEET_KEY}=$(openssl rand -hex 32) gives the run a new one"
    )


def check_fleet_key(variables: Mapping[str, str]) -> None:
    """Raises ConfigError where the secret of the environment is one that trainer and workers would refuse."""
    key = variables.get(FLEET_KEY, "")
    if key and len(key) < LEAST_KEY:
        raise ConfigError(
            f"{FLEET_KEY} has {len(key)} characters, which could be guessed: unset it, or export"
            f" {FLEET_KEY}=$(openssl rand -hex 32)"
        )


def _kept(path: Path, given: str) -> str:
    """A secret of a file; where there is none, the file is made of what is given, or of a new one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(given or secrets.token_urlsafe(24))
    return path.read_text()


def _login(file: Path, machine: str) -> str:
    try:
        known = netrc.netrc(str(file)).authenticators(machine)
    except (OSError, netrc.NetrcParseError):
        return ""
    return (known[2] or "") if known else ""
