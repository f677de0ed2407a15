"""What of the repository would go up to the machines of a launch and must not.

Names of secrets are left out by every platform (`trainer/config/never_sent.txt`). This looks at what could
slip through: a secret in a file of another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipes.platforms.targets import target_named
from recipes.records import manifest
from trainer.config import ConfigError
from trainer.config.never_sent import is_secret
from trainer.system.redaction import secret_in_text

MOST_BYTES = 1 << 20
"""Largest file that is searched: secrets are small."""


def check_sent_tree(target: str, secrets: Mapping[str, str]) -> None:
    """Raises ConfigError naming a file with a secret that would be copied to the machines of `target`.

    secrets: the tokens of this launch by name, which are looked for too.
    """
    if not target_named(target).copies_tree:
        return
    for name in manifest.changed_files() + manifest.untracked_files():
        what = ""
        if is_secret(name):  # left out, but SkyPilot's patterns do not look into hidden folders
            what = "has a secret's name in a hidden folder" if name.startswith(".") and "/" in name else ""
        elif not name.startswith("tests/"):  # keys there are of the tests
            holds = secret_in_file(Path(name), secrets)
            what = f"holds {holds}" if holds else ""
        if what:
            raise ConfigError(
                f"{name} {what}, and the repository is copied to the machines of {target}: move it out"
                f" of {Path.cwd()}"
            )


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
