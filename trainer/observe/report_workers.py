"""The part of a report that shows who sampled: rollout workers by GPU, and why those that ended did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.observe.history import column
from trainer.observe.report_page import table_cells

MAX_ENDED = 12
"""Workers that have ended of which the page says why, the newest ones."""


def workers_section(workers: Sequence[dict[str, Any]], usd_per_1000: Mapping[str, float]) -> str:
    """Tables of GPUs and of ends; "" without workers. usd_per_1000: dollars by GPU, as the desk knows
    them."""
    if not workers:
        return ""
    total = sum(column(workers, "completions"))
    rows = []
    for device in dict.fromkeys(worker["device"] for worker in workers):
        mine = [worker for worker in workers if worker["device"] == device]
        sampled = sum(column(mine, "completions"))
        alive = sum(worker["lives"] for worker in mine)
        share = f"{sampled / total:.0%}" if total else "–"
        rows.append([device, f"{alive} of {len(mine)}", f"{sampled:,}", share])
    shown = _table(["GPU", "alive at the end", "completions since the last start", "share"], rows)

    costs = [[gpu, f"${usd:,.3f}"] for gpu, usd in sorted(usd_per_1000.items())]
    if costs:
        shown += _table(["GPU", "1,000 samples, idle time included"], costs)
    ended = [worker for worker in workers if not worker["lives"]]
    if ended:
        whys = [[worker["worker"], worker["why"]] for worker in ended[-MAX_ENDED:]]
        shown += _table(["worker", "why it ended"], whys)
    return f'<h2>Rollout workers</h2><section class="phases">{shown}</section>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = table_cells(columns, "th")
    body = "".join(f"<tr>{table_cells(row)}</tr>" for row in rows)
    return f"<table class=wide><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
