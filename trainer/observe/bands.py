"""Bands from runs of one's own, for `expected` of a recipe: `python -m trainer.observe.bands`.

    python -m trainer.observe.bands runs/a runs/b runs/c --source "three seeds, AMD EPYC" \\
        --band eval/accuracy:0.08 --band reward/accuracy:0.1:5 --every 10 > bands.yaml

A band is METRIC:MARGIN[:WINDOW]. At every tenth step its edges are the smallest and the largest value of all
runs, the margin further apart; with a window, of the median of that many steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Band, ConfigError, Expected, to_dict
from trainer.config.expected import check_bands
from trainer.observe.history import read_history


@dataclass(frozen=True)
class WantedBand:
    """What is asked of one band."""

    metric: str
    margin: float
    window: int = 1

    @classmethod
    def parse(cls, text: str) -> WantedBand:
        """From METRIC:MARGIN[:WINDOW]. Raises ConfigError."""
        metric, _, rest = text.partition(":")
        margin, _, window = rest.partition(":")
        try:
            return cls(metric, float(margin), int(window or 1))
        except ValueError:
            raise ConfigError(f"--band {text}: write it as METRIC:MARGIN[:WINDOW]") from None


def band_of_runs(
    wanted: WantedBand, runs: Sequence[Sequence[Mapping[str, Any]]], every: int, source: str
) -> Band:
    """The band of one metric over several runs. Raises ConfigError where they do not have it."""
    by_step: dict[int, list[float]] = {}
    for history in runs:
        recent: list[float] = []
        for record in history:
            if wanted.metric not in record:
                continue
            recent.append(float(record[wanted.metric]))
            del recent[: -wanted.window]
            if len(recent) == wanted.window and record["step"] % every == 0:
                by_step.setdefault(record["step"], []).append(statistics.median(recent))
    steps = []
    low = []
    high = []
    for step, medians in sorted(by_step.items()):
        if len(medians) == len(runs):
            steps.append(step)
            low.append(round(min(medians) - wanted.margin, 4))
            high.append(round(max(medians) + wanted.margin, 4))
    if not steps:
        raise ConfigError(f"{wanted.metric}: no step that is a multiple of {every} has it in every run")
    return Band(
        metric=wanted.metric,
        steps=tuple(steps),
        low=tuple(low),
        high=tuple(high),
        window=wanted.window,
        source=source,
    )


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m trainer.observe.bands", description=__doc__, formatter_class=form
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs with different seeds")
    parser.add_argument("--band", action="append", required=True, metavar="METRIC:MARGIN[:WINDOW]")
    parser.add_argument("--every", type=int, default=10, help="steps between two edges (%(default)s)")
    parser.add_argument("--source", required=True, help="which runs: seeds, machine")
    parser.add_argument("--not-promised", default="", help="what the bands do not say")
    args = parser.parse_args(argv)
    try:
        runs = list(map(read_history, args.runs))
        bands = [band_of_runs(WantedBand.parse(text), runs, args.every, args.source) for text in args.band]
        expected = Expected(bands=tuple(bands), not_promised=args.not_promised)
        check_bands(expected)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(yaml.safe_dump(to_dict(expected), sort_keys=False, width=110), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
