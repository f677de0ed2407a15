"""What the report of a run and that of several share: the page, a run's name, its cost."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PULLED = "pulled"
"""Folder of a run's record on the desk that its files are fetched into (recipes/drivers/run_view.py)."""


def html_page(title: str, body: str) -> str:
    """A page that loads nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{_asset('report.css')}</style></head><body><main>{body}</main>"
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def table_cells(texts: Iterable[str], tag: str = "td") -> str:
    """The cells of a table's row."""
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def run_name(folder: Path) -> str:
    """A run's id: that of its folder, or of the folder that it was pulled into."""
    return folder.absolute().parent.name if folder.name == PULLED else folder.absolute().name


def read_cost(folder: Path) -> dict[str, Any]:
    """`cost.json`, which the desk writes: usd, hours; planned_usd and planned_hours where there is a plan;
    usd_per_1000, dollars of 1,000 samples by GPU, where rollout workers sample."""
    try:
        cost = json.loads((folder / "cost.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(cost, dict):
        return {}
    return {name: value for name, value in cost.items() if isinstance(value, int | float | dict)}


def format_cost(folder: Path) -> str:
    """Dollars so far against those planned."""
    known = read_cost(folder)
    if not known.get("usd") and not known.get("planned_usd"):
        return "–"
    planned = f" of {known['planned_usd']:,.2f} planned" if known.get("planned_usd") else ""
    return f"${known['usd']:,.2f}{planned}"
