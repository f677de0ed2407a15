"""What of the repository would go up to the machines of a launch and must not.

Names of secrets are left out by every platform (`trainer/config/never_sent.txt`). This looks at what could
slip through: a listed file that SkyPilot would send because git tracks it or because the folder is no git
repository, and a secret in a file of another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from recipes.platforms.targets import target_named
from recipes.records import manifest
from trainer.config import ConfigError
from trainer.config.never_sent import is_secret

COPIED_BY = ("sky", "dstack", "kubectl", "ssh")
"""Platforms whose machines get a copy of the repository."""
MOST_BYTES = 1 << 20
"""Largest file that is searched: secrets are small."""
LEAST_SECRET = 16
"""Characters from which on a token is looked for by its value."""
SIGNS = {
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a service account's key": rb'"private_key"\s*:\s*"[^"]{20}',
    "the key of a cluster's client": rb"client-key-data:\s*\S{20}",
    "an AWS key": rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret": rb"(?i)aws_secret_access_key\W{1,6}[A-Za-z0-9/+]{40}\b",
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}\b",
    "a GitHub token": rb"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,})\b",
    "a RunPod key": rb"\brpa_[A-Z0-9]{40,}",
    "an API key": rb"\bsk-[A-Za-z0-9_-]{32,}\b",
    "a login of .netrc": rb"\bmachine\s+\S+\s+(login\s+\S+\s+)?password\s+\S{8,}",
    "an address with a password": rb"\b[a-z]{3,}://[^\s/@:'\"{}$]+:[^\s/@:'\"{}$]{8,}@",
}
"""What a secret looks like, by what it is called."""


def check_sent_tree(target: str, secrets: Mapping[str, str]) -> None:
    """Raises ConfigError naming a file with a secret that would be copied to the machines of `target`.

    secrets: the tokens of this launch by name, which are looked for too.
    """
    platform = target_named(target).program
    if platform not in COPIED_BY:
        return
    if platform == "sky":
        _check_names()
    changed = manifest.changed_files() + manifest.untracked_files()
    config = [".git/config"] if platform == "sky" else []  # SkyPilot copies .git as well
    for name in changed + config:
        made_up = name.startswith("tests/")  # keys there are of the tests
        what = "" if made_up or is_secret(name) else secret_in_file(Path(name), secrets)
        if what:
            raise ConfigError(
                f"{name} holds {what}, and the repository is copied to the machines of {target}: move it out"
                f" of {Path.cwd()}"
            )


def _check_names() -> None:
    """Raises ConfigError where SkyPilot, which leaves out what git ignores and nothing else, would send a
    file of the list."""
    repository = bool(manifest.run_git("rev-parse", "--git-dir"))
    listed = manifest.kept_files() if repository else _all_files()
    sent = [name for name in listed if is_secret(name)]
    if sent:
        why = "git knows it" if repository else "this folder is no git repository, so .gitignore says nothing"
        raise ConfigError(
            f"SkyPilot would copy {sent[0]} to the machines ({why}), and its name is that of a secret: move"
            f" it out of {Path.cwd()}"
        )


def _all_files() -> list[str]:
    return [str(path) for path in Path(".").rglob("*") if path.is_file()]


def secret_in_file(path: Path, secrets: Mapping[str, str]) -> str:
    """What secret a file holds; "" if none is seen. Raises nothing for what cannot be read: it is not sent
    either."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return ""
        text = path.read_bytes()
    except OSError:
        return ""
    return secret_in_text(text, secrets)


def secret_in_text(text: bytes, secrets: Mapping[str, str]) -> str:
    """What secret a text holds; "" if none is seen. secrets: values that are looked for too, by name."""
    for name, value in secrets.items():
        if len(value) >= LEAST_SECRET and value.strip().encode() in text:
            return f"the value of {name}"
    return next((what for what, pattern in SIGNS.items() if re.search(pattern, text)), "")
