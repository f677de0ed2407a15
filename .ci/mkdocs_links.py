"""Of the site: a link to a file outside docs/ becomes that file's path, if the file is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def outside(markdown: str, page: str) -> str:
    """A page's text without links that leave docs/. Raises FileNotFoundError for one that leads nowhere."""

    def path_of(link: re.Match[str]) -> str:
        words, path = link[1], link[2]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"docs/{page} links to {path}")
        return words if path in words else f"{words} (`{path}`)"

    return LINK.sub(path_of, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return outside(markdown, page.file.src_path)
