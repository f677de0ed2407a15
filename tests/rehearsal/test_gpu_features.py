"""The table of what was run, executed, rehearsed and read names tests and figures that are there."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_features
from benchmarks.gpu_features import Feature


def test_the_page_has_the_table_of_today(capsys):
    assert gpu_features.main(["--check"]) == 0, capsys.readouterr().out


def test_only_what_passed_counts_as_executed():
    feature = Feature(name="x", run=("GPU memory",), executed=("test_a.py::test_b",))
    card = {"figures": {"GPU memory used": {}, "parity": {}}}
    results = {"tests": {"test_a.py::test_b[1]": {"passed": True}, "test_a.py::test_b[2]": {"passed": True}}}
    assert gpu_features.shown(feature, card, results) == (["GPU memory used"], ["test_a.py::test_b"], [])
    results["tests"]["test_a.py::test_b[2]"]["passed"] = False
    assert gpu_features.shown(feature, card, results)[1] == []
    assert gpu_features.shown(feature, card, {"tests": {}})[1] == []


@pytest.mark.parametrize(
    "feature, wrong",
    [
        (Feature(name="x", run=("no such figure",)), "gpu.json has no figure"),
        (Feature(name="x", executed=("test_device.py::test_gone",)), "there is no test"),
        (Feature(name="x", rehearsed=("learning/test_gone.py",)), "there is no test"),
    ],
)
def test_names_that_mean_nothing_are_refused(monkeypatch, feature, wrong):
    monkeypatch.setattr(gpu_features, "FEATURES", (feature,))
    assert [wrong in problem for problem in gpu_features.problems()] == [True]


def test_the_record_is_of_tests_that_exist():
    results = json.loads(gpu_features.EXECUTED.read_text())
    for name in results["tests"]:
        file, _, test = name.partition("::")
        known = gpu_features.functions(gpu_features.ROOT / "tests/nullgpu" / file)
        assert test.partition("[")[0] in known
