"""What a report draws, and how: curves and bars as inline SVG, from numbers and the standard library alone.
Colors are CSS classes (`s1`...`s8`), so that a page can be light or dark. A line has at most `MAX_POINTS`
vertices: the smallest and the largest value of every bucket of steps, so that no spike is lost."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

WIDTH, HEIGHT = 560, 230
BROAD = 2 * WIDTH + 20
"""Width of a figure that takes the whole page."""
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
    name: str
    """Name of the metric."""
    label: str
    """Text of the legend."""
    color: int = 1
    """1 to 8."""
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
    return [(record["step"], float(record[name])) for record in history if name in record]


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
    for bound, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= bound:
            return f"{value / unit:.{digits}g}{suffix}"
    return f"{value:.{digits}g}" if size < 1000 else f"{value:,.0f}"


# --- drawing --------------------------------------------------------------------------------------------


def line_chart(chart: Chart, history: Sequence[dict[str, Any]], marks: Sequence[int] = ()) -> str:
    """A figure, or "" where no line of the chart has a value. marks: steps after which the run was
    resumed."""
    curves = [(line, points) for line in chart.lines if (points := series(history, line.name))]
    edges = [_drawable(series(history, name), chart.log) for name in chart.band or ()]
    measured = list(chain.from_iterable(points for _, points in curves))
    values = [value for _, value in chain(_drawable(measured, chart.log), *edges)]
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
            lower, upper = map(downsample, edges)
            parts.append(f'<path class="band" d="{_path(frame, [*upper, *reversed(lower)])}Z"/>')
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
    count = min(len(rows), 100)
    bars: list[tuple[float, float, list[float]]] = []
    for i in range(count):
        bucket = rows[i * len(rows) // count : (i + 1) * len(rows) // count]
        columns = zip(*map(itemgetter(1), bucket), strict=True)
        means = [sum(column) / len(bucket) for column in columns]
        bars.append((bucket[0][0] - 0.5, bucket[-1][0] + 0.5, means))
    ticks = nice_ticks(0, max(sum(stack) for *_, stack in bars))
    frame = Frame(bars[0][0], bars[-1][1], 0, ticks[-1], y_ticks=ticks, width=BROAD)
    legend = ""
    for name, color in keys:
        legend += f'<span class="key s{color}"><i></i>{html.escape(name)}</span>'

    def shapes(frame: Frame) -> str:
        parts = [_axes(frame)]
        for first, last, stack in bars:
            left, right = frame.x(first), frame.x(last)
            base = 0.0
            gap = min(1.5, (right - left) * 0.15)
            for (_, color), value in zip(keys, stack, strict=True):
                top, bottom = frame.y(base + value), frame.y(base)
                if bottom - top > 0.05:
                    parts.append(
                        f'<rect class="f{color}" x="{left + gap / 2:.1f}" y="{top:.1f}" '
                        f'width="{right - left - gap:.1f}" height="{bottom - top:.1f}"/>'
                    )
                base += value
        return "".join(parts)

    return _figure(chart, frame, legend, shapes, hover=False)


def _drawable(points: Sequence[Point], log: bool) -> list[Point]:
    """The points that have a place in the chart: those that are finite, with ticks beyond them too, and
    positive on a logarithmic axis."""
    return [(step, value) for step, value in points if abs(value) < MOST and (value > LEAST or not log)]


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
    width = BROAD if chart.wide else WIDTH
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
    ticks = nice_ticks(first, last, 10 if frame.width > WIDTH else 6)
    for tick in [t for t in ticks if t == round(t) and first <= t <= last] or [first]:
        parts.append(f'<text class="xtick" x="{frame.x(tick):.1f}" y="{HEIGHT - 8}">{tick:,.0f}</text>')
    return "".join(parts)


def _marks(frame: Frame, marks: Sequence[int]) -> str:
    paths = ""
    for mark in marks:
        if frame.x0 <= mark <= frame.x1:
            x = frame.x(mark + 0.5 if mark + 0.5 <= frame.x1 else mark)
            paths += f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
    return paths


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in points)


def _curve(frame: Frame, line: Line, points: Sequence[Point]) -> str:
    if not points:
        return ""
    kept = downsample(points)
    kind = ""
    shapes = f'<path class="main" d="{_path(frame, kept)}"/>'
    if line.dots or len(points) == 1:
        kind = " dots"
        for step, value in kept:
            shapes += f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3"/>'
    elif len(points) >= SMOOTH_FROM:
        even = _smoothed(points, frame.log)
        stride = max(len(even) // MAX_POINTS, 1)
        even = even[:-1:stride] + even[-1:]
        shapes = f'<path class="raw" d="{_path(frame, kept)}"/><path class="main" d="{_path(frame, even)}"/>'
    return f'<g class="s{line.color}{kind}" data-name="{html.escape(line.label)}">{shapes}</g>'


def _smoothed(points: Sequence[Point], log: bool) -> list[Point]:
    """The points smoothed over a fifteenth of the curve; for a logarithmic axis, their logarithms are."""
    span = max(len(points) // 15, 5)
    if not log:
        return smooth(points, span)
    logarithms = [(step, math.log10(value)) for step, value in points]
    return [(step, 10**value) for step, value in smooth(logarithms, span)]


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


# --- the charts of a report -----------------------------------------------------------------------------

ROWS = (
    ("Accuracy", "reward/accuracy 1 training completions; eval/accuracy 2 held out",
     "Share of correct completions: those sampled for training, and those to held-out questions.",
     "percent wide"),
    ("Reward", "reward/mean 1 mean; reward/std 8 std", "Before any normalization.", ""),
    ("Completion format", "reward/format 3 well-formed; reward/no_answer_rate 4 no answer",
     "Completions in the form that rewards.answer asks for; no final answer found.", "percent"),
    ("KL to the reference", "kl/mean 5 nats/token", "How far the policy has moved.", "zero"),
    ("Entropy", "entropy/mean 6 nats/token", "Its collapse ends exploration.", "zero"),
    ("Completion length", "tokens/response_mean 1 mean tokens",
     "The band spans the shortest and the longest completion of the step.", "zero band"),
    ("Cut short, and groups all alike",
     "tokens/truncated_fraction 2 completions cut; group/zero_std_fraction 8 groups without variance",
     "Completions at the token limit; prompts whose completions all earned the same and teach nothing.",
     "percent"),
    ("Turns", "turns/replies_mean 1 replies; turns/errors_mean 4 wrong calls", "Of an episode, in the mean.",
     "zero"),
    ("Episodes cut short, and tools that fail",
     "turns/limit_fraction 2 at the limit of turns; turns/images_fraction 8 at the limit of images; "
     "turns/failed_fraction 4 observations of a failure", "", "percent skip_flat"),
    ("Time in tools", "perf/tool_s_max 1 s in tools; perf/tool_wait_s_max 4 s waited for",
     "Slow tools of one engine, calls added up, and what the engine waited for them; the largest of each.",
     "zero skip_flat"),
    ("Losses", "loss/total 1 total; loss/policy 2 policy",
     "The policy loss is near 0 by construction where each step is one update.", ""),
    ("Gradient norm", "grad/norm 4 before clipping", "", "log"),
    ("Engine against policy", "mismatch/logprob_abs_mean 6 mean; mismatch/logprob_abs_max 4 max",
     "Difference of log-probabilities of the sampled tokens, in nats.", "log"),
    ("Older weights against the policy", "staleness/logprob_abs_mean 6 mean; staleness/logprob_abs_max 4 max",
     "The same where older weights sampled the step: what the rollout correction weighs.", "log"),
    ("Steps that samples are behind", "rollout/staleness_mean 6 mean; rollout/staleness_max 4 most",
     "Updates since the weights that sampled the step.", "zero"),
    ("Waiting for rollout workers", "fleet/wait_s 8 s",
     "Seconds of each step in which the trainer had nothing to learn from.", "zero"),
    ("Rollout workers without a unit", "fleet/idle_share 2 share of their time",
     "What is paid for and not used: near 0 where the trainer waits, larger where there are too many.",
     "percent"),
    ("Rollout workers alive", "fleet/workers 1 workers", "", "zero"),
    ("Clipping", "ratio/clip_fraction 2 tokens clipped", "Share of tokens whose surrogate was clipped.",
     "percent"),
    ("Cross-entropy", "sft/loss 1 nats/token", "Of the completion tokens.", ""),
    ("Learning rate", "optim/lr 8 ", "", "zero skip_flat"),
    ("Grading trouble", "reward/timeout_rate 4 timeouts; reward/error_rate 2 errors", "",
     "percent skip_flat"),
    ("Rollout speed", "perf/rollout_tokens_per_s 1 tokens/s", "All engines together.", "zero"),
    ("Decode slots", "perf/slots_used 1 used",
     "Share that held an unfinished completion while engines decoded.", "percent zero skip_flat"),
    ("Training speed", "perf/train_tokens_per_s 3 tokens/s", "All ranks together.", "zero"),
    ("Model FLOPs utilisation", "perf/mfu_train 1 update; perf/mfu_rollout 2 rollout",
     "Share of the GPUs' peak that the model's own arithmetic takes.", "percent"),
    ("Checkpoints", "perf/checkpoint_save_s 1 s to save and upload; perf/checkpoint_stall_s 4 s held up",
     "The last save from start to commit, beside training, and what of it held training up.",
     "zero skip_flat"),
    ("Peak memory", "perf/peak_memory_gib 8 GiB", "The fullest rank.", "zero"),
)  # fmt: skip
"""(title, lines as "METRIC COLOR LABEL; ...", note, what of `Chart` is true). band: from the shortest to the
longest of the step."""


def _charts() -> Iterator[Chart]:
    for title, lines, note, words in ROWS:
        drawn = []
        for line in lines.split("; "):
            name, color, label = line.split(" ", 2)
            drawn.append(Line(name, label, int(color), dots=name.startswith("eval/")))
        how: dict[str, Any] = dict.fromkeys(words.split(), True)
        if "band" in how:
            how["band"] = tuple(drawn[0].name.replace("_mean", end) for end in ("_min", "_max"))
        yield Chart(title, tuple(drawn), note, **how)


HELD_OUT, *CHARTS = _charts()
