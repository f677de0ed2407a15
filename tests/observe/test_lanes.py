"""A run whose sampling goes on while it learns: two lanes, in what other processes read and people see."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from rich.console import Console

from trainer import config as c
from trainer.config.run_folder import LEARNING, SAMPLING, lane_progress, read_progress
from trainer.node.watch import watchdog
from trainer.node.watch.watchdog import Watchdog
from trainer.observe import live
from trainer.observe.phases import Phases, mean_seconds
from trainer.observe.report import phases_section


@pytest.fixture
def two_lanes(tmp_path):
    """Step 3 is learned while step 4 is sampled."""
    phases = Phases(tmp_path)
    sampling = phases.lane(SAMPLING)
    phases.begin(3, 9)
    sampling.begin(4)
    return tmp_path, phases, sampling


def test_each_lane_has_a_clock_and_a_phase_of_its_own(two_lanes):
    folder, phases, sampling = two_lanes
    with phases("update"), sampling("rollout"):
        time.sleep(0.05)
        learns, samples = lane_progress(read_progress(folder))
        assert (learns.name, learns.step, learns.phase) == (LEARNING, 3, "update")
        assert (samples.name, samples.step, samples.phase) == (SAMPLING, 4, "rollout")
        # what reads only the run's step and phase reads those of the learning lane
        assert read_progress(folder)["phase"] == "update" and read_progress(folder)["step"] == 3
    of_learning = phases.take()
    of_sampling = sampling.take(SAMPLING)
    assert set(of_learning) == {"time/update_s", "time/step_s"}
    assert set(of_sampling) == {"time/rollout_s", "time/sampling_s"}
    assert of_sampling["time/sampling_s"] >= of_sampling["time/rollout_s"] >= 0.05


def test_two_threads_never_tear_what_they_write(two_lanes):
    folder, phases, sampling = two_lanes
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            with sampling("rollout"):
                pass

    thread = threading.Thread(target=sample)
    thread.start()
    for _ in range(200):
        with phases("update"):
            assert len(lane_progress(json.loads((folder / "progress.json").read_text()))) == 2
    over.set()
    thread.join()


def test_one_lane_is_written_as_ever_and_an_ended_run_has_one(tmp_path, two_lanes):
    single = tmp_path / "single"
    single.mkdir()
    Phases(single).begin(1, 2)
    assert "lanes" not in read_progress(single)
    (only,) = lane_progress(read_progress(single))
    assert only.name == ""
    folder, phases, _ = two_lanes
    phases.finish("failed")
    (only,) = lane_progress(read_progress(folder))
    assert only.phase == "failed"


def test_the_watchdog_has_a_rule_for_each_lane(two_lanes, monkeypatch):
    folder, phases, sampling = two_lanes
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    config = c.RunConfig(run=c.Run(dir=str(folder)), watch=c.Watch(first_s=0.2, floor_s=0.1))
    dog = Watchdog(config)
    dog._born = 0.0
    record = {"step": 1, "time/step_s": 9.0, "time/rollout_s": 100.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with phases("wait"), sampling("rollout"):
        time.sleep(0.3)
        assert dog.overdue() == ""  # a rollout takes 100 s, and who waits for it is not at fault
    with phases("update"), sampling("grade"):
        time.sleep(0.3)
        assert {dog.overdue(), dog.overdue(), dog.overdue()} == {
            "no progress in phase update of step 3 (learning) for 0 s (limit 0)",
            "no progress in phase grade of step 4 (sampling) for 0 s (limit 0)",
            "",
        }
    with phases("wait"), sampling("wait"):
        time.sleep(0.3)
        assert "no progress in phase wait" in dog.overdue()  # each waits for the other


HISTORY = [{"step": 1, "time/step_s": 8.0, "time/rollout_s": 5.0, "time/update_s": 2.0}]
HISTORY += [HISTORY[0] | {"step": 2, "time/step_s": 3.0, "time/wait_s": 0.5, "time/sampling_s": 6.0}]
HISTORY[1]["time/grade_s"] = 1.0


def test_times_are_shown_by_lane():
    assert mean_seconds(HISTORY) == {
        LEARNING: [("wait", 0.5), ("update", 2.0), ("other", 0.5)],
        SAMPLING: [("rollout", 5.0), ("grade", 1.0)],
    }
    page = phases_section(HISTORY)
    assert "Seconds per step: learning" in page and "Seconds per step: sampling" in page
    assert "Seconds per step: " not in phases_section(HISTORY[:1])
    line = live.step_line(HISTORY[1], 0)
    assert "3.0 s (wait 0.5 update 2.0 rollout 5.0 grade 1.0)" in line


def test_the_display_names_both_lanes(two_lanes):
    folder, phases, sampling = two_lanes
    console = Console(file=io.StringIO(), width=100, color_system=None, _environ={})
    with phases("update"), sampling("rollout"):
        console.print(live.render_display(folder, read_progress(folder), HISTORY, 100))
    shown = console.file.getvalue()
    assert "learning step 3: update" in shown and "sampling step 4: rollout" in shown
    assert "learning:" in shown and "sampling:" in shown
