"""Bands that are made from runs."""

import json

import pytest
import yaml

from recipes.presets import get
from tests.loops.jobs import ROOT
from trainer.config import Expected, from_dict
from trainer.config.expected import compare_with_bands
from trainer.observe import bands
from trainer.observe.history import read_history


@pytest.fixture
def runs(tmp_path):
    folders = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        lines = [{"step": step, "reward/mean": 0.01 * step + 0.1 * seed} for step in range(1, 31)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(folder)
    return folders


def made(runs, capsys, *options):
    code = bands.main([*map(str, runs), "--source", "three seeds", *options])
    return code, capsys.readouterr()


def test_a_band_spans_all_runs_and_the_margin(runs, capsys):
    code, told = made(runs, capsys, "--band", "reward/mean:0.05")
    expected = from_dict(Expected, yaml.safe_load(told.out))
    (band,) = expected.bands
    assert code == 0 and band.steps == (10, 20, 30)
    assert band.low == (0.05, 0.15, 0.25) and band.high == (0.35, 0.45, 0.55)
    assert all(not compare_with_bands(expected, read_history(run)).departures for run in runs)


def test_a_window_gives_the_band_of_its_median(runs, capsys):
    _, told = made(runs, capsys, "--band", "reward/mean:0:5")
    (band,) = from_dict(Expected, yaml.safe_load(told.out)).bands
    assert band.window == 5 and band.low == (0.08, 0.18, 0.28)


@pytest.mark.parametrize(
    ("option", "message"),
    [("reward/mean:x", "write it as METRIC:MARGIN"), ("kl/mean:1", "no step that is a multiple of 10")],
)
def test_what_no_run_has_is_refused(runs, capsys, option, message):
    code, told = made(runs, capsys, "--band", option)
    assert code == 2 and message in told.err


def test_the_demo_is_within_its_bands_as_it_was_recorded():
    """`tests/loops/test_demo_bits.py` holds the demo to this record, bit for bit; a run of that length that
    learned nothing leaves the bands at the first evaluation after its start."""
    expected = get("demo").config.expected
    recorded = [json.loads(line) for line in (ROOT / "benchmarks/demo_bits.jsonl").read_text().splitlines()]
    verdict = compare_with_bands(expected, recorded)
    assert str(verdict) == "within expectation up to step 60"

    stuck = recorded[0]["eval/accuracy"]
    flat = [line | ({"eval/accuracy": stuck} if "eval/accuracy" in line else {}) for line in recorded]
    (left,) = compare_with_bands(expected, flat).departures
    assert (left.step, left.band.metric) == (10, "eval/accuracy")
