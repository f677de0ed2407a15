"""What a run was expected to do, in its report: a table, and shaded bands behind the curves."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.config import Expected
from trainer.config.expected import compare_with_bands
from trainer.observe.charts import Chart
from trainer.observe.differences import state_of
from trainer.observe.report_page import table_cells


def _edge(metric: str, side: str) -> str:
    """Name of a band's edge among the metrics of a step."""
    return f"expected/{side}/{metric}"


def with_edges(history: Sequence[dict[str, Any]], expected: Expected) -> list[dict[str, Any]]:
    """The history with both edges of every band as metrics of its steps, as far as the run has come."""
    records = []
    for record in history:
        edges: dict[str, float] = {}
        for band in expected.bands:
            found = band.edges(record["step"])
            if found is not None and all(map(math.isfinite, found)):
                edges[_edge(band.metric, "low")], edges[_edge(band.metric, "high")] = found
        records.append(record | edges)
    return records


def chart_with_band(chart: Chart, expected: Expected) -> Chart:
    """The chart with the band of one of its lines, if one has any and the chart has no other."""
    if chart.band:
        return chart
    lines = {line.name: line.label for line in chart.lines}
    for band in expected.bands:
        if band.metric in lines and band.low and band.high:
            what = lines[band.metric]
            note = f"{chart.note} Shaded: what is expected of {what or band.metric}.".strip()
            return replace(chart, note=note, band=(_edge(band.metric, "low"), _edge(band.metric, "high")))
    return chart


def expectation_section(expected: Expected, history: Sequence[dict[str, Any]]) -> str:
    """How the run compares with what was expected of it; empty where nothing was."""
    if not expected.bands:
        return ""
    verdict = compare_with_bands(expected, history)
    rows = ""
    for band in expected.bands:
        cells = (band.metric, str(band).removeprefix(band.metric), state_of(band, verdict), band.source)
        rows += f"<tr>{table_cells(cells)}</tr>"
    head = table_cells(("metric", "expected", "this run", "source"), "th")
    promise = f"<p>Not promised: {html.escape(expected.not_promised)}</p>" if expected.not_promised else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    title = f"<h2>Expected <small>{html.escape(str(verdict))}</small></h2>"
    return f'{title}<section class="phases">{table}</section>{promise}'
