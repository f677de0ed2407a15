"""Where a run left what was expected of it, and where two runs part, as the commands say it."""

import json
from dataclasses import replace

import pytest
from written_run import write_run

from trainer import config as c
from trainer.config import Band, Expected
from trainer.config.run_folder import CONFIG, METRICS
from trainer.observe import differences, report

WIDE = Band(metric="reward/mean", steps=(1, 99), low=(-9.0, -9.0), high=(9.0, 9.0), source="three seeds")
NARROW = Band(metric="reward/mean", steps=(5, 99), low=(8.0, 8.0), high=(9.0, 9.0), window=3, source="a page")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    write_run(folder, 12)
    return folder


def expect(folder, *bands, not_promised=""):
    config = c.load(folder / CONFIG)
    config = replace(config, expected=Expected(bands=bands, not_promised=not_promised))
    (folder / CONFIG).write_text(c.dump(config))


def test_a_run_inside_its_bands_ends_with_0(run, capsys):
    expect(run, WIDE, not_promised="seconds")
    assert differences.main([str(run), "--expected"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one: within expectation up to step 12\n")
    assert "reward/mean  inside, 12 compared  (three seeds)" in out and "not promised: seconds" in out


def test_a_run_outside_names_the_first_step_and_ends_with_1(run, capsys):
    expect(run, WIDE, NARROW)
    assert differences.main([str(run), "--expected"]) == 1
    assert capsys.readouterr().out.startswith(
        "one: step 7: reward/mean left its band: the median of its last 3 values"
    )


def test_bands_of_a_file(run, tmp_path, capsys):
    file = tmp_path / "bands.yaml"
    file.write_text("bands:\n- {metric: reward/mean, steps: [1], high: [-5], source: mine}\n")
    assert differences.main([str(run), "--expected", str(file)]) == 1
    assert "expected at most -5" in capsys.readouterr().out
    file.write_text("bands:\n- {metrik: reward/mean}\n")
    assert differences.main([str(run), "--expected", str(file)]) == 2
    assert "did you mean bands[0].metric?" in capsys.readouterr().err


def test_a_recipe_without_bands_is_said(run, capsys):
    assert differences.main([str(run), "--expected"]) == 2
    assert "its recipe has no bands" in capsys.readouterr().err


def test_dollars_are_those_that_the_desk_counted(run, capsys):
    (run / "cost.json").write_text(json.dumps({"usd": 12.5, "hours": 2.0}))
    dear = Band(metric="cost/usd", steps=(0, 99), high=(10.0, 10.0), source="the plan")
    expect(run, dear)
    assert differences.main([str(run), "--expected"]) == 1
    assert "step 12: cost/usd left its band: it is 12.5, expected at most 10" in capsys.readouterr().out


def test_equal_runs_are_equal_whatever_they_took(run, tmp_path, capsys):
    other = tmp_path / "two"
    write_run(other, 12)
    change(other, 3, {"time/step_s": 99.0, "perf/mfu_train": 0.9})
    assert differences.main([str(run), str(other)]) == 0
    assert "are equal in all 13 steps" in capsys.readouterr().out


def test_runs_that_part_name_the_first_step_and_the_metrics(run, tmp_path, capsys):
    other = tmp_path / "two"
    write_run(other, 12)
    change(other, 4, {"reward/mean": 0.123})
    change(other, 7, {"kl/mean": 0.456})
    assert differences.main([str(run), str(other)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("one and two part at step 4, in 1 metrics:") and "and 0.123" in out
    assert "kl/mean" not in out


def test_the_report_shows_bands_and_how_the_run_compares(run):
    expect(run, WIDE)
    text = report.write_report(run).read_text()
    assert "within expectation up to step 12" in text and "three seeds" in text
    assert 'class="band"' in text and "Shaded: what is expected of mean." in text


def change(folder, step, values):
    path = folder / METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | values if line["step"] == step else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
