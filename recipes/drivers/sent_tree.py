"""What of the repository would go up to the machines of a launch and must not.

Names of secrets are left out by every platform (`trainer/config/never_sent.txt`). This looks at what could
slip through: a listed file that SkyPilot would send because git tracks it or because the folder is no git
repository, and a secret in a file of another name.
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
    platform = target_named(target)
    if not platform.copies_tree:
        return
    if platform.copies_git:
        _check_names()
    changed = manifest.changed_files() + manifest.untracked_files()
    config = [".git/config"] if platform.copies_git else []
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
