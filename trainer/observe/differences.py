"""Where a run left what was expected of it, and where two runs part: `python -m trainer.observe.differences`.

    python -m trainer.observe.differences RUN_DIR --expected           # the bands of the run's own recipe
    python -m trainer.observe.differences RUN_DIR --expected bands.yaml
    python -m trainer.observe.differences RUN_DIR RUN_DIR

The exit code is 0 where the run is as expected, or the two are equal, and 1 where not.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Band, ConfigError, Expected, from_dict, load
from trainer.config.expected import BandVerdict, check_bands, compare_with_bands
from trainer.config.run_folder import CONFIG
from trainer.observe.history import read_history, reproducible_part
from trainer.observe.report_page import read_cost, run_name

OWN = "own"
"""`--expected` without a file."""
SHOWN = 12
"""Metrics that are named where two runs part."""
TIMES = ("time/", "perf/", "cost/")
"""Metrics that differ between equal runs."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics per step, in order of steps; the newest one has the dollars so far, where the desk knows
    them. Raises ConfigError where there are none."""
    history = read_history(folder)
    if not history:
        raise ConfigError(f"no metrics in {folder}: give a run that has made at least one step")
    dollars = read_cost(folder).get("usd")
    if dollars:
        history[-1] = history[-1] | {"cost/usd": dollars}
    return history


def expected_of(folder: Path, source: str) -> Expected:
    """The bands that a run is held against: its own, or those of a YAML file with `bands`."""
    if source == OWN:
        expected = load(folder / CONFIG).expected
        if not expected.bands:
            raise ConfigError(
                f"nothing is expected of {run_name(folder)}: its recipe has no bands. Give a file of them:"
                " --expected bands.yaml"
            )
        return expected
    try:
        data = yaml.safe_load(Path(source).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}") from None
    expected = from_dict(Expected, data, "")
    check_bands(expected)
    return expected


def state_of(band: Band, verdict: BandVerdict) -> str:
    """One band's line of a comparison."""
    for departure in verdict.departures:
        if departure.band is band:
            return f"left at step {departure.step}: {departure.value:.4g}"
    count = verdict.measured.get(band.metric, 0)
    return f"inside, {count} compared" if count else "not measured yet"


def against_bands(folder: Path, source: str) -> int:
    """Prints where the run left its bands, first step first. Returns the exit code."""
    expected = expected_of(folder, source)
    verdict = compare_with_bands(expected, metrics_of(folder))
    print(f"{run_name(folder)}: {verdict}")
    for departure in verdict.departures[1:]:
        print(f"  then {departure}")
    width = max(len(band.metric) for band in expected.bands)
    for band in expected.bands:
        print(f"  {band.metric:<{width}}  {state_of(band, verdict)}  ({band.source})")
    if expected.not_promised:
        print(f"  not promised: {expected.not_promised}")
    return 1 if verdict.departures else 0


def against_run(first: Path, second: Path) -> int:
    """Prints the first step at which two runs differ, and in what. Returns the exit code.

    Times and speeds are left out: equal runs have different ones.
    """
    ours = _by_step(first)
    theirs = _by_step(second)
    names = f"{run_name(first)} and {run_name(second)}"
    both = sorted(ours.keys() & theirs.keys())
    for step in both:
        differing = _differing(ours[step], theirs[step])
        if not differing:
            continue
        print(f"{names} part at step {step}, in {len(differing)} metrics:")
        for name, one, other in differing[:SHOWN]:
            print(f"  {name}: {one} and {other}")
        if len(differing) > SHOWN:
            print(f"  and {len(differing) - SHOWN} more")
        return 1
    if not both:
        print(f"{names} have no step in common")
        return 1
    print(f"{names} are equal in all {len(both)} steps that both have metrics of, up to step {both[-1]}")
    return 0


def _by_step(folder: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in metrics_of(folder)}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Metrics that are not the same to the last bit, with both values."""
    left, right = reproducible_part(one), reproducible_part(other)
    differing = []
    for name in sorted(left.keys() | right.keys()):
        if name.startswith(TIMES):
            continue
        a, b = left.get(name), right.get(name)
        both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        if a != b and not both_nan:
            differing.append((name, _shown(a), _shown(b)))
    return differing


def _shown(value: Any) -> str:
    return "absent" if value is None else f"{value!r}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.observe.differences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="+", help="one run with --expected, or two")
    parser.add_argument("--expected", nargs="?", const=OWN, default="", metavar="FILE.yaml")
    args = parser.parse_args(argv)
    try:
        if args.expected and len(args.runs) == 1:
            return against_bands(args.runs[0], args.expected)
        if not args.expected and len(args.runs) == 2:
            return against_run(*args.runs)
        raise ConfigError("give one run with --expected, or two runs")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
