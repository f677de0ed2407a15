"""The one list of files that never leave the desk: names under which people and tools keep secrets.

`never_sent.txt` has a pattern a line, in the form that git, dstack, rsync, tar and `fnmatch` read alike: a
name anywhere in the tree, with its folder's content. rsync and tar read that file; `.gitignore` (git,
SkyPilot) and `.dstackignore` repeat it, which a test holds.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath

FILE = Path(__file__).with_suffix(".txt")
IN_TREE = "trainer/config/never_sent.txt"
"""The list as a command that runs in the repository's root names it."""


@cache
def secret_patterns() -> tuple[str, ...]:
    """The list, in lower case."""
    return tuple(FILE.read_text().lower().split())


@cache
def _is_listed(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in secret_patterns())


def is_secret(path: str | PurePath) -> bool:
    """Whether a path's name, or that of a folder above it, is one of the list, in upper or lower case."""
    return any(_is_listed(part.lower()) for part in PurePath(path).parts)
