"""The section of a report that shows what the time of a step went into, for every lane of the run."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.run_folder import SAMPLING
from trainer.observe.charts import Chart, stacked_bars
from trainer.observe.live import format_duration
from trainer.observe.phases import mean_seconds
from trainer.observe.report_charts import PHASE_COLORS

OTHER = 8
"""Color of the time that no phase covers."""


def phases_section(history: Sequence[Mapping[str, Any]]) -> str:
    """A bar, a chart over steps and a table for each lane; empty where no step was timed."""
    shown = ""
    for lane, means in mean_seconds(history).items():
        if means:
            shown += _lane(history, lane, means)
    if not shown:
        return ""
    return f'<h2>Where the time went</h2><section class="phases">{shown}</section>'


def _lane(history: Sequence[Mapping[str, Any]], lane: str, means: Sequence[tuple[str, float]]) -> str:
    whole = f"time/{SAMPLING}_s" if lane == SAMPLING else "time/step_s"
    timed = [record for record in history if whole in record]
    keys = [(name, PHASE_COLORS.get(name, OTHER)) for name, _ in means]
    rows = []
    for record in timed:
        values: list[float] = []
        for name, _ in means:
            if name == "other":
                values.append(max(record[whole] - sum(values), 0.0))
            else:
                values.append(record.get(f"time/{name}_s", 0.0))
        rows.append((record["step"], values))

    title = f"Seconds per step: {lane}" if lane else "Seconds per step"
    chart = Chart(title, (), "What each step spent its time on.", wide=True)
    total = sum(seconds for _, seconds in means) or 1.0
    bar, table = "", ""
    for (name, color), (_, seconds) in zip(keys, means, strict=True):
        share = 100 * seconds / total
        bar += f'<i class="b{color}" style="width:{share:.2f}%" title="{html.escape(name)}"></i>'
        table += (
            f'<tr><td><span class="key s{color}"><i></i>{html.escape(name)}</span></td>'
            f"<td>{share:.1f}%</td><td>{seconds:.3g} s</td>"
            f"<td>{format_duration(seconds * len(timed))}</td></tr>"
        )
    head = "<th>phase</th><th>share</th><th>mean per step</th><th>total</th>"
    return (
        f'<div class="bar">{bar}</div>{stacked_bars(chart, rows, keys)}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>"
    )
