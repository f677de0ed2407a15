"""Runs beside each other: where one left what was expected of it, where two part, and the page of several."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from written_run import write_run

from recipes.presets import get
from tests.loops.jobs import ROOT
from trainer import config as c
from trainer.config import Band, ConfigError, Expected
from trainer.config.expected import compare_with_bands
from trainer.config.run_folder import CONFIG, METRICS
from trainer.observe import compare, report

WIDE = Band(metric="reward/mean", steps=(1, 99), low=(-9.0, -9.0), high=(9.0, 9.0), source="three seeds")
NARROW = Band(metric="reward/mean", steps=(5, 99), low=(8.0, 8.0), high=(9.0, 9.0), window=3, source="a page")
DEAR = Band(metric="cost/usd", steps=(0, 99), high=(10.0, 10.0), source="the plan")


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "one", 12)
    return tmp_path / "one"


def expect(folder, *bands):
    config = replace(c.load(folder / CONFIG), expected=Expected(bands=bands, not_promised="seconds"))
    (folder / CONFIG).write_text(c.dump(config))


@pytest.mark.parametrize(
    ("bands", "code", "first", "more"),
    [
        ((WIDE,), 0, "one: within expectation up to step 12\n", "inside, 12 compared  (three seeds)\n"),
        ((WIDE, NARROW), 1, "one: step 7: reward/mean left its band: the median of its last 3", "8 to 9"),
        ((DEAR,), 1, "one: step 12: cost/usd left its band: it is 12.5, expected at most 10", "(the plan)"),
    ],
    ids=["inside", "outside", "dollars that the desk counted"],
)
def test_a_run_is_held_against_its_bands(run, capsys, bands, code, first, more):
    expect(run, *bands)
    (run / "cost.json").write_text(json.dumps({"usd": 12.5, "hours": 2.0}))
    assert compare.main([str(run), "--expected"]) == code
    out = capsys.readouterr().out
    assert out.startswith(first) and more in out and out.endswith("not promised: seconds\n")
    page = report.write_report(run).read_text()
    shaded = "Shaded: what is expected of mean." in page
    assert bands[-1].source in page and shaded == (bands[0] is WIDE)


def test_a_recipe_without_bands_is_named(run, capsys):
    assert compare.main([str(run), "--expected"]) == 2
    assert "its recipe has no bands" in capsys.readouterr().err


def test_the_demo_is_within_its_bands_as_it_was_recorded():
    """`tests/loops/test_demo_bits.py` holds the demo to this record, bit for bit; a run of that length that
    learned nothing leaves the bands at the first evaluation after its start."""
    expected = get("demo").config.expected
    recorded = [json.loads(line) for line in (ROOT / "benchmarks/demo_bits.jsonl").read_text().splitlines()]
    assert str(compare_with_bands(expected, recorded)) == "within expectation up to step 60"

    stuck = recorded[0]["eval/accuracy"]
    flat = [line | ({"eval/accuracy": stuck} if "eval/accuracy" in line else {}) for line in recorded]
    (left,) = compare_with_bands(expected, flat).departures
    assert (left.step, left.band.metric) == (10, "eval/accuracy")


@pytest.mark.parametrize(
    ("changes", "code", "out"),
    [
        ({3: {"time/step_s": 99.0, "perf/mfu_train": 0.9}}, 0, "one and two are equal in all 13 steps"),
        (
            {4: {"reward/mean": 0.123}, 7: {"kl/mean": 0.456}},
            1,
            "one and two part at step 4, in 1 metrics:\n",
        ),
    ],
)
def test_equal_runs_are_equal_whatever_they_took_and_others_part_at_a_step(run, capsys, changes, code, out):
    other = run.with_name("two")
    write_run(other, 12)
    lines = [json.loads(line) for line in (other / METRICS).read_text().splitlines()]
    lines = [json.dumps(line | changes.get(line["step"], {})) for line in lines]
    (other / METRICS).write_text("\n".join(lines) + "\n")
    assert compare.main([str(run), str(other)]) == code
    shown = capsys.readouterr().out
    assert shown.startswith(out) and "kl/mean" not in shown and ("and 0.123" in shown) == bool(code)


def test_runs_lie_over_each_other_and_what_differs_is_named(tmp_path):
    runs = [tmp_path / name for name in ("slow", "fast")]
    for run, rate in zip(runs, ("1e-6", "2e-6"), strict=True):
        write_run(run, 30, overrides=("logging.tensorboard=false", f"optimizer.learning_rate={rate}"))
    (runs[1] / "cost.json").write_text(json.dumps({"usd": 12.5, "hours": 2.0, "planned_usd": 40.0}))
    assert report.main([*map(str, runs), "--out", str(tmp_path / "out.html")]) == 0
    page = (tmp_path / "out.html").read_text()
    drawings = [ET.fromstring(t) for t in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    named = [[g.get("data-name") for g in svg.iter("g") if g.get("data-name")] for svg in drawings]
    assert len(named) >= 15 and all(names == ["slow", "fast"] for names in named)
    assert "<h3>Losses: policy</h3>" in page and "<h3>Accuracy: held out</h3>" in page
    changed = "<td>optimizer.learning_rate</td><td>1e-06</td><td>2e-06</td>"
    assert changed in page and "1 fields differ" in page and "$12.50 of 40.00 planned" in page
    assert "http" not in page.replace("http-equiv", "") and "default-src 'none'" in page


@pytest.mark.parametrize(("names", "words"), [(["one"] * 9, "at most 8"), (["one", "none"], "no metrics in")])
def test_too_many_runs_and_a_run_without_a_step_are_refused(run, tmp_path, names, words):
    with pytest.raises(ConfigError, match=words):
        compare.write_comparison([tmp_path / name for name in names], tmp_path / "out.html")
