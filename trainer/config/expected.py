"""What a run should look like: bands that its metrics should lie in, step by step, and where a run left them.
Standard library only."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.ranges import ranged_field
from trainer.system.errors import ConfigError

SHARES = ("accuracy", "_fraction", "_rate", "_share", "format")
"""Endings of metrics between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Where one metric should lie. Between the named steps the edges are straight lines; outside of them
    nothing is expected."""

    metric: str = ""
    """Name in metrics.jsonl: `eval/accuracy`."""
    steps: tuple[int, ...] = ()
    """Steps at which the edges are given, ascending."""
    low: tuple[float, ...] = ()
    """Lower edge at each of those steps; empty: there is none."""
    high: tuple[float, ...] = ()
    """Upper edge at each of those steps; empty: there is none."""
    window: int = ranged_field(1, least=1)
    """Measurements whose median is compared: a noisy metric needs several."""
    source: str = ""
    """Where the band comes from: own runs with seeds and processor, or a published page with its scorer."""

    def edges(self, step: int) -> tuple[float, float] | None:
        """Lower and upper edge at a step, infinite where there is none; None where nothing is expected."""
        if not self.steps[0] <= step <= self.steps[-1]:
            return None
        low = _between(self.steps, self.low, step) if self.low else -math.inf
        high = _between(self.steps, self.high, step) if self.high else math.inf
        return low, high

    def __str__(self) -> str:
        last = self.steps[-1]
        low = self.low[-1] if self.low else -math.inf
        high = self.high[-1] if self.high else math.inf
        if self.metric.endswith(SHARES) and high >= 1.0:  # no share is larger
            high = math.inf
        return f"{self.metric} {_interval(low, high, 2)} at step {last}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run is expected to do."""

    bands: tuple[Band, ...] = ()
    """Bands of its metrics; empty: nothing is promised."""
    not_promised: str = ""
    """What the bands do not say, in a sentence."""


@dataclass(frozen=True)
class Departure:
    """Where a run left one of its bands for the first time."""

    band: Band
    step: int
    value: float
    """Median of the last `band.window` measurements; NaN if one of them was not finite."""
    low: float
    high: float

    def __str__(self) -> str:
        what = f"the median of its last {self.band.window} values" if self.band.window > 1 else "it"
        return (
            f"step {self.step}: {self.band.metric} left its band: {what} is {self.value:.4g},"
            f" expected {_interval(self.low, self.high)}"
        )


def compare_with_bands(expected: Expected, history: Iterable[Mapping[str, Any]]) -> ExpectationWatch:
    """Holds a run's metrics, in order of steps, against its bands."""
    watch = ExpectationWatch(expected)
    for record in history:
        watch.look(record["step"], record)
    return watch


class ExpectationWatch:
    """Follows a run step by step, and says how it compares with what was expected of it."""

    def __init__(self, expected: Expected) -> None:
        self._bands = expected.bands
        self._recent: list[list[float]] = [[] for _ in self._bands]
        self._outside: dict[int, Departure] = {}
        self._first: dict[int, Departure] = {}
        self.measured: Counter[str] = Counter()
        """Measurements that were compared, by metric."""
        self.last_step = -1
        """The newest step that was compared; -1 before the first."""

    @property
    def departures(self) -> list[Departure]:
        """The first one of each band, first step first."""
        return sorted(self._first.values(), key=lambda departure: departure.step)

    def look(self, step: int, stats: Mapping[str, Any]) -> list[Departure]:
        """The bands that the run is outside of after this step, by their newest comparison."""
        for number, band in enumerate(self._bands):
            edges = band.edges(step)
            if edges is None or stats.get(band.metric) is None:
                continue
            recent = self._recent[number]
            recent.append(float(stats[band.metric]))
            del recent[: -band.window]
            if len(recent) < band.window:
                continue
            middle = statistics.median(recent) if all(map(math.isfinite, recent)) else math.nan
            self.measured[band.metric] += 1
            self.last_step = max(self.last_step, step)
            low, high = edges
            if low <= middle <= high:
                self._outside.pop(number, None)
                continue
            self._outside[number] = Departure(band, step, middle, low, high)
            self._first.setdefault(number, self._outside[number])
        return list(self._outside.values())

    def state_of(self, band: Band) -> str:
        """One band's line of a comparison."""
        for departure in self._first.values():
            if departure.band is band:
                return f"left at step {departure.step}: {departure.value:.4g}"
        count = self.measured[band.metric]
        return f"inside, {count} compared" if count else "not measured yet"

    def __str__(self) -> str:
        if self._first:
            return str(self.departures[0])
        if self.last_step < 0:
            return "nothing that is expected was measured yet"
        return f"within expectation up to step {self.last_step}"


def check_bands(expected: Expected) -> None:
    """Raises ConfigError for a band that says nothing, with the change to make."""
    for number, band in enumerate(expected.bands):
        wrong = _fault(band)
        if wrong:
            raise ConfigError(f"expected.bands[{number}]{wrong}")


def _fault(band: Band) -> str:
    if not band.metric or not band.source:
        return ": name its metric and its source"
    if band.window < 1:
        return f".window is {band.window}: it must be at least 1"
    if not band.steps or sorted(set(band.steps)) != list(band.steps):
        return f".steps is {list(band.steps)}: give ascending steps, at least one"
    for name, edge in (("low", band.low), ("high", band.high)):
        if edge and len(edge) != len(band.steps):
            return f".{name} has {len(edge)} values for {len(band.steps)} steps: give one for each"
    if not band.low and not band.high:
        return ": give low, high or both"
    if band.low and band.high and any(low > high for low, high in zip(band.low, band.high, strict=True)):
        return ": low is above high at one of its steps: swap them"
    return ""


def _between(steps: Sequence[int], values: Sequence[float], step: int) -> float:
    """The value at a step that lies within `steps`, on the straight line between its neighbors."""
    right = bisect_right(steps, step)
    if right == len(steps):
        return values[-1]
    left = right - 1
    share = (step - steps[left]) / (steps[right] - steps[left])
    return values[left] + share * (values[right] - values[left])


def _interval(low: float, high: float, digits: int = 4) -> str:
    if math.isinf(low):
        return f"at most {high:.{digits}g}"
    if math.isinf(high):
        return f"at least {low:.{digits}g}"
    return f"{low:.{digits}g} to {high:.{digits}g}"
