"""Bands of metrics: their edges between steps, where a run leaves them, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainer import config as c
from trainer.config import Band, ConfigError, Expected, RunConfig
from trainer.config.expected import ExpectationWatch, check_bands, compare_with_bands

ACCURACY = Band(
    metric="eval/accuracy", steps=(0, 10, 60), low=(0.3, 0.6, 0.8), high=(0.4, 0.8, 1.0), source="own runs"
)


def history(metric, values):
    return [{"step": step, metric: value} for step, value in values.items()]


@pytest.mark.parametrize(
    ("step", "edges"),
    [(0, (0.3, 0.4)), (5, (0.45, 0.6)), (10, (0.6, 0.8)), (35, (0.7, 0.9)), (60, (0.8, 1.0))],
)
def test_edges_are_straight_lines_between_the_named_steps(step, edges):
    assert ACCURACY.edges(step) == pytest.approx(edges)


def test_nothing_is_expected_outside_of_the_named_steps():
    assert ACCURACY.edges(61) is None
    assert (
        compare_with_bands(Expected(bands=(ACCURACY,)), history("eval/accuracy", {61: 0.0})).last_step == -1
    )


def test_a_run_inside_its_bands_is_within_expectation():
    verdict = compare_with_bands(
        Expected(bands=(ACCURACY,)), history("eval/accuracy", {0: 0.35, 10: 0.7, 60: 0.9})
    )
    assert not verdict.departures and verdict.measured == {"eval/accuracy": 3}
    assert str(verdict) == "within expectation up to step 60"


def test_the_first_step_outside_comes_first():
    reward = replace(ACCURACY, metric="reward/mean")
    records = [
        {"step": 10, "eval/accuracy": 0.7, "reward/mean": 0.1},
        {"step": 20, "eval/accuracy": 0.2, "reward/mean": 0.9},
        {"step": 30, "eval/accuracy": 0.1, "reward/mean": 0.1},
    ]
    verdict = compare_with_bands(Expected(bands=(ACCURACY, reward)), records)
    assert [(d.band.metric, d.step) for d in verdict.departures] == [
        ("reward/mean", 10),
        ("eval/accuracy", 20),
    ]
    assert str(verdict) == "step 10: reward/mean left its band: it is 0.1, expected 0.6 to 0.8"


def test_a_window_compares_the_median_and_waits_until_it_is_full():
    band = replace(ACCURACY, window=3)
    values = {10: 0.7, 11: 0.0, 12: 0.7, 13: 0.0}
    verdict = compare_with_bands(Expected(bands=(band,)), history("eval/accuracy", values))
    assert [(d.step, d.value) for d in verdict.departures] == [(13, 0.0)]
    assert verdict.measured == {"eval/accuracy": 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, "NaN"])
def test_what_is_not_finite_is_outside(value):
    assert compare_with_bands(Expected(bands=(ACCURACY,)), history("eval/accuracy", {10: value})).departures


def test_a_band_with_one_edge():
    band = Band(metric="time/step_s", steps=(1, 9), high=(100.0, 100.0), source="a page")
    verdict = compare_with_bands(Expected(bands=(band,)), history("time/step_s", {1: 5.0, 2: 150.0}))
    assert str(verdict).endswith("it is 150, expected at most 100")


def test_a_run_stays_outside_until_it_is_measured_inside():
    watch = ExpectationWatch(Expected(bands=(ACCURACY,)))
    measured = {10: 0.1, 11: None, 20: 0.75, 21: None, 30: 0.2}
    outside = [
        bool(watch.look(step, {} if value is None else {"eval/accuracy": value}))
        for step, value in measured.items()
    ]
    assert outside == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": ""}, "name its metric and its source"),
        ({"source": ""}, "name its metric and its source"),
        ({"steps": (10, 0, 60)}, "ascending"),
        ({"low": (0.1,)}, "has 1 values for 3 steps"),
        ({"low": (), "high": ()}, "give low, high or both"),
        ({"low": (0.9, 0.9, 0.9)}, "low is above high"),
        ({"window": 0}, "must be at least 1"),
    ],
)
def test_a_band_that_says_nothing_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        check_bands(Expected(bands=(replace(ACCURACY, **change),)))


def test_bands_are_kept_in_the_configuration_and_never_hinder_a_resume(tmp_path):
    config = replace(RunConfig(), expected=Expected(bands=(ACCURACY,), not_promised="seconds"))
    (tmp_path / "run.yaml").write_text(c.dump(config))
    assert c.load(tmp_path / "run.yaml") == config
    assert c.difference(config, c.resume_view(RunConfig())) == ""
