"""Curves and bars as inline SVG, for the report: pure functions of numbers, standard library only.

Colors are CSS classes (`s1`...`s8`), so that a page can be light or dark. A line has at most `MAX_POINTS`
vertices: the smallest and the largest value of every bucket of steps, so that no spike is lost.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

WIDTH, HEIGHT = 560, 230
LEFT = 50
RIGHT = 14
TOP = 10
BOTTOM = 28
MAX_POINTS = 400
SMOOTH_FROM = 40
"""A curve of at least this many points is also drawn smoothed, the raw one pale behind it."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    """Name of the metric."""
    label: str
    """Text of the legend."""
    color: int = 1
    """Color, 1 to 8."""
    dots: bool = False
    """Whether its points are few and separate measurements: drawn with dots, never smoothed."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    note: str = ""
    """One sentence under the title."""
    percent: bool = False
    log: bool = False
    zero: bool = False
    """Whether the axis starts at 0."""
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper edge of a shaded band."""
    wide: bool = False
    """Whether it takes the page's whole width."""
    skip_flat: bool = False
    """Whether the chart is left out if no value ever changes."""


@dataclass(frozen=True)
class Frame:
    """Maps data to pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False
    percent: bool = False
    y_ticks: list[float] = field(default_factory=list)
    width: int = WIDTH

    def x(self, step: float) -> float:
        """Pixel of a step."""
        return LEFT + (step - self.x0) / ((self.x1 - self.x0) or 1) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a value."""
        low = self._scaled(self.y0)
        high = self._scaled(self.y1)
        share = (self._scaled(value) - low) / ((high - low) or 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


# --- numbers --------------------------------------------------------------------------------------------


def series(history: Sequence[dict[str, Any]], name: str) -> list[Point]:
    """(step, value) wherever the metric was written."""
    points = []
    for record in history:
        if name in record:
            points.append((record["step"], float(record[name])))
    return points


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: first and last, and smallest and largest of every bucket, in order."""
    if len(points) <= limit:
        return list(points)
    inner, buckets = points[1:-1], max((limit - 2) // 2, 1)
    kept = [points[0]]
    for i in range(buckets):
        bucket = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """Mean over the `span` points around each one, as far as there are that many."""
    sums = [0.0, *accumulate(v for _, v in points)]
    out = []
    for i, (step, _) in enumerate(points):
        first, last = max(i - span // 2, 0), min(i + span // 2 + 1, len(points))
        out.append((step, (sums[last] - sums[first]) / (last - first)))
    return out


LEAST = 1e-200
"""Numbers below it are drawn as 0."""
MOST = 1e200
"""Numbers of this size and above are not drawn."""


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that cover [low, high] in about `count` steps."""
    size = max(abs(low), abs(high))
    if size < LEAST:  # the power of ten below such a number is 0
        high = low + 1.0
    elif high - low <= 1e-12 * size:
        high = low + 0.1 * size
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = raw
    for multiple in (1, 2, 2.5, 5, 10):
        step = multiple * power
        if raw <= step * 1.0000001:
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high], thinned to at most seven."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    last = first + math.ceil((last - first) / stride) * stride
    return [10.0**e for e in range(first, last + 1, stride)]


def format_number(value: float, percent: bool = False, digits: int = 3) -> str:
    """A short number: 0.25 -> "0.25" or "25%", 12000 -> "12k", 3e-7 -> "3e-7"."""
    if not math.isfinite(value):
        return str(value)
    if percent:
        return f"{100 * value:.{max(digits - 2, 0)}f}".rstrip("0").rstrip(".") + "%" if value else "0%"
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for bound, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]:.{digits}g}{suffix}"
    return f"{value:.{digits}g}" if size < 1000 else f"{value:,.0f}"


# --- drawing --------------------------------------------------------------------------------------------


def line_chart(chart: Chart, history: Sequence[dict[str, Any]], marks: Sequence[int] = ()) -> str:
    """A figure, or "" where no line of the chart has a value. marks: steps after which the run was
    resumed."""
    curves: list[tuple[Line, list[Point]]] = []
    measured: list[Point] = []
    drawn: list[Point] = []
    for line in chart.lines:
        points = series(history, line.name)
        if points:
            curves.append((line, points))
            measured += points
            drawn += _drawable(points, chart.log)
    edges = [_drawable(series(history, name), chart.log) for name in chart.band or ()]
    for edge in edges:
        drawn += edge

    values = [value for _, value in drawn]
    if not values or (chart.skip_flat and len(set(values)) == 1):
        return ""
    legend = ""
    for line, points in curves:
        last = format_number(points[-1][1], chart.percent)
        legend += f'<span class="key s{line.color}"><i></i>{html.escape(line.label)} <b>{last}</b></span>'
    bad = [step for step, value in measured if not math.isfinite(value)]
    if bad:
        legend += f'<span class="key alarm">{len(bad)} not finite</span>'

    def shapes(frame: Frame) -> str:
        parts = [_axes(frame), _marks(frame, marks)]
        if len(edges) == 2 and all(edges):
            parts.append(_band(frame, *edges))
        parts += [_curve(frame, line, _drawable(points, chart.log)) for line, points in curves]
        for step in sorted(set(bad))[:200]:
            parts.append(f'<path class="bad" d="M{frame.x(step):.1f} {HEIGHT - BOTTOM}v-9"/>')
        return "".join(parts)

    return _figure(chart, _frame(chart, values, min(measured)[0], max(measured)[0]), legend, shapes)


def stacked_bars(
    chart: Chart, rows: Sequence[tuple[float, Sequence[float]]], keys: Sequence[tuple[str, int]]
) -> str:
    """Bars over steps, each a stack. rows: (step, one value per key); more than 100 are averaged in
    buckets."""
    if not rows:
        return ""
    count = min(len(rows), 100)
    buckets = []
    stacks = []
    for i in range(count):
        bucket = rows[i * len(rows) // count : (i + 1) * len(rows) // count]
        buckets.append(bucket)
        stacks.append(_mean_of_each_key(bucket))
    width = 2 * WIDTH + 20
    ticks = nice_ticks(0, max(map(sum, stacks)))
    frame = Frame(rows[0][0] - 0.5, rows[-1][0] + 0.5, 0, ticks[-1], y_ticks=ticks, width=width)
    legend = ""
    for name, color in keys:
        legend += f'<span class="key s{color}"><i></i>{html.escape(name)}</span>'
    colors = [color for _, color in keys]
    return _figure(chart, frame, legend, lambda frame: _bars(frame, buckets, stacks, colors), hover=False)


def _bars(
    frame: Frame,
    buckets: Sequence[Sequence[tuple[float, Sequence[float]]]],
    stacks: Sequence[Sequence[float]],
    colors: Sequence[int],
) -> str:
    """A bar for each bucket of steps, a stack of one value per color."""
    shapes = [_axes(frame)]
    for bucket, stack in zip(buckets, stacks, strict=True):
        left = frame.x(bucket[0][0] - 0.5)
        right = frame.x(bucket[-1][0] + 0.5)
        base = 0.0
        gap = min(1.5, (right - left) * 0.15)
        for color, value in zip(colors, stack, strict=True):
            top, bottom = frame.y(base + value), frame.y(base)
            if bottom - top > 0.05:
                shapes.append(
                    f'<rect class="f{color}" x="{left + gap / 2:.1f}" y="{top:.1f}" '
                    f'width="{right - left - gap:.1f}" height="{bottom - top:.1f}"/>'
                )
            base += value
    return "".join(shapes)


def _mean_of_each_key(rows: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    columns = zip(*map(itemgetter(1), rows), strict=True)
    return [sum(column) / len(rows) for column in columns]


def _drawable(points: Sequence[Point], log: bool) -> list[Point]:
    """The points that have a place in the chart: those that are finite, with ticks beyond them too, and
    positive on a logarithmic axis."""
    drawn = []
    for step, value in points:
        if abs(value) < MOST and (value > LEAST or not log):
            drawn.append((step, value))
    return drawn


def _frame(chart: Chart, values: Sequence[float], first: float, last: float) -> Frame:
    low, high = min(values), max(values)
    if chart.log:
        ticks = log_ticks(low, high)
    else:
        low = min(low, 0.0) if chart.zero or chart.percent else low
        ticks = nice_ticks(low, high)
        if chart.percent and high <= 1:
            ticks = [t for t in ticks if t <= 1.0 + 1e-9]
            ticks = ticks if ticks[-1] >= high else [*ticks, 1.0]
    width = 2 * WIDTH + 20 if chart.wide else WIDTH
    return Frame(first, last, ticks[0], ticks[-1], chart.log, chart.percent, ticks, width)


def _axes(frame: Frame) -> str:
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{frame.width - RIGHT}"/>')
        parts.append(
            f'<text class="ytick" x="{LEFT - 8}" y="{y + 4:.1f}">{format_number(tick, frame.percent)}</text>'
        )
    first, last = math.ceil(frame.x0), math.floor(frame.x1)
    ticks = []
    for t in nice_ticks(first, last, 10 if frame.width > WIDTH else 6):
        if t == round(t) and first <= t <= last:
            ticks.append(t)

    for tick in ticks or [first]:
        parts.append(f'<text class="xtick" x="{frame.x(tick):.1f}" y="{HEIGHT - 8}">{tick:,.0f}</text>')
    return "".join(parts)


def _marks(frame: Frame, marks: Sequence[int]) -> str:
    paths = []
    for mark in marks:
        if frame.x0 <= mark <= frame.x1:
            x = frame.x(mark + 0.5 if mark + 0.5 <= frame.x1 else mark)
            paths.append(f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
    return "".join(paths)


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in points)


def _curve(frame: Frame, line: Line, points: Sequence[Point]) -> str:
    if not points:
        return ""
    name = html.escape(line.label)
    kept = downsample(points)
    if line.dots or len(points) == 1:
        dots = ""
        for step, value in kept:
            dots += f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3"/>'
        path = f'<path class="main" d="{_path(frame, kept)}"/>'
        return f'<g class="s{line.color} dots" data-name="{name}">{path}{dots}</g>'
    if len(points) < SMOOTH_FROM:
        return (
            f'<g class="s{line.color}" data-name="{name}"><path class="main" d="{_path(frame, kept)}"/></g>'
        )
    even = _smoothed(points, frame.log)
    stride = max(len(even) // MAX_POINTS, 1)
    even = even[:-1:stride] + even[-1:]
    return (
        f'<g class="s{line.color}" data-name="{name}"><path class="raw" d="{_path(frame, kept)}"/>'
        f'<path class="main" d="{_path(frame, even)}"/></g>'
    )


def _smoothed(points: Sequence[Point], log: bool) -> list[Point]:
    """The points smoothed over a fifteenth of the curve; for a logarithmic axis, their logarithms are."""
    span = max(len(points) // 15, 5)
    if not log:
        return smooth(points, span)
    logarithms = [(step, math.log10(value)) for step, value in points]
    return [(step, 10**value) for step, value in smooth(logarithms, span)]


def _band(frame: Frame, lower: Sequence[Point], upper: Sequence[Point]) -> str:
    lower, upper = downsample(lower), downsample(upper)
    return f'<path class="band" d="{_path(frame, [*upper, *reversed(lower)])}Z"/>'


def _figure(
    chart: Chart, frame: Frame, legend: str, shapes: Callable[[Frame], str], hover: bool = True
) -> str:
    """The figure with its drawing; one of the page's whole width is drawn a second time for a phone, where it
    would be a line of 40 pixels."""
    note = f"<p>{html.escape(chart.note)}</p>" if chart.note else ""
    scale = f'data-x0="{frame.x0}" data-x1="{frame.x1}" data-y0="{frame.y0:g}" data-y1="{frame.y1:g}"'
    kind = f' data-log="{int(frame.log)}" data-percent="{int(frame.percent)}"'
    size = " wide" if frame.width > WIDTH else ""
    title = html.escape(chart.title)
    widths = {"broad": frame.width, "narrow": WIDTH} if size else {"": WIDTH}
    drawings = ""
    for name, width in widths.items():
        drawn = shapes(replace(frame, width=width))
        drawings += (
            f'<svg class="{name}" viewBox="0 0 {width} {HEIGHT}" role="img" '
            f'aria-label="{title}" {scale + kind if hover else ""}>{drawn}</svg>'
        )
    return (
        f'<figure class="chart{size}"><figcaption><h3>{title}</h3>'
        f'<div class="legend">{legend}</div></figcaption>{note}{drawings}</figure>'
    )
