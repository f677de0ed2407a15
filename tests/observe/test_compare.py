"""The report of several runs, and what a report says of the machines."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from written_run import write_run

from trainer.config import ConfigError
from trainer.observe import report, report_page
from trainer.observe.compare import MAX_RUNS, write_comparison
from trainer.observe.node_monitor import append_sample
from trainer.observe.report_page import stragglers, waits_by_phase


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
    assert (
        "<td>optimizer.learning_rate</td><td>1e-06</td><td>2e-06</td>" in page and "1 fields differ" in page
    )
    assert "$12.50 of 40.00 planned" in page
    assert "http" not in page.replace("http-equiv", "") and "default-src 'none'" in page


def test_too_many_runs_and_a_run_without_a_step_are_refused(tmp_path):
    write_run(tmp_path / "one", 2)
    with pytest.raises(ConfigError, match="at most 8"):
        write_comparison([tmp_path / "one"] * (MAX_RUNS + 1), tmp_path / "out.html")
    with pytest.raises(ConfigError, match="no metrics in"):
        write_comparison([tmp_path / "one", tmp_path], tmp_path / "out.html")


def samples(seconds: int, waited: dict[int, dict[str, float]], nodes: int = 2):
    """Samples every 10 s of ranks dealt to nodes in turn; phases change every 50 s. waited: rank -> phase ->
    share."""
    total = dict.fromkeys(waited, 0.0)
    for at in range(0, seconds, 10):
        phase = ("update", "sync")[at // 50 % 2]
        for rank in waited:
            total[rank] += 10 * waited[rank][phase]
        for node in range(nodes):
            ranks = {str(r): [at, total[r]] for r in waited if r % nodes == node}
            yield {"node": node, "unix_s": 1000.0 + at, "phase": phase, "ranks": ranks, "gpus": []}


def test_the_share_of_waiting_is_told_per_phase_and_the_straggler_named_in_its_phase():
    alike, slow = {"update": 0.6, "sync": 0.3}, {"update": 0.1, "sync": 0.3}
    shares = waits_by_phase(list(samples(500, {0: alike, 1: alike, 2: slow, 3: alike})))
    for rank, of in ((0, alike), (2, slow)):
        assert {phase: shares[phase][rank] for phase in of} == pytest.approx(of)
    assert stragglers(shares["update"]) == [2] and stragglers(shares["sync"]) == []
    assert stragglers({0: 0.2}) == []


def test_a_rank_that_was_started_again_does_not_wait_backwards():
    before, after = (
        list(samples(100, {0: {"update": 0.5, "sync": 0.5}}, 1)),
        list(samples(100, {0: {"update": 0.5, "sync": 0.5}}, 1)),
    )
    shares = waits_by_phase(before + [s | {"unix_s": s["unix_s"] + 100} for s in after])
    assert all(0 <= share <= 0.5 for of in shares.values() for share in of.values())


def test_the_report_shows_nodes_gpus_and_the_straggler(tmp_path):
    write_run(tmp_path, 5)
    gpu = {"gpu": 0, "busy_fraction": 0.5, "memory_bytes": 70 << 30, "power_w": 600.0, "temperature_c": 71}
    alike, slow = {"update": 0.6, "sync": 0.3}, {"update": 0.1, "sync": 0.3}
    for sample in samples(300, {0: alike, 1: slow, 2: alike, 3: alike}):
        hot = [gpu | {"slowdown": 64}, gpu | {"slowdown": 4}]
        own = {"gpus": hot, "memory_fraction": 0.4, "bytes_per_s": {"network_in": 2e6, "network_out": 1e6}}
        with (tmp_path / "nodes.jsonl").open("a") as file:
            file.write(json.dumps(sample | own) + "\n")
    page = report.write_report(tmp_path).read_text()
    for text in ("Machines", "70.0 GiB", "71 °C", "600 W", "50% of samples", "2 MB/s"):
        assert text in page, text
    assert page.count("keeps the others waiting: update") == 1
    assert re.search(r"<td>1</td><td>(9|10|11)%</td>.*?keeps the others waiting: update", page)


def test_a_run_without_samples_has_no_such_part(tmp_path):
    assert report_page.nodes_section([]) == ""
    append_sample(tmp_path, {"node": 0, "unix_s": 1.0, "ranks": {}, "gpus": []})
    assert json.loads((tmp_path / "nodes.jsonl").read_text())["phase"] == ""
