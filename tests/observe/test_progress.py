import io
import json
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from written_run import write_run

from trainer.config import RunConfig, override
from trainer.observe import live as progress
from trainer.observe.metrics import Metrics
from trainer.observe.phases import Phases, mean_seconds


def text_console(terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, _environ={})


def test_a_finished_run_gives_one_line_per_step_where_there_is_no_terminal(tmp_path):
    write_run(tmp_path, 12)
    command = [sys.executable, "-m", "trainer.observe.live", str(tmp_path)]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert len(lines) == 14  # 12 steps, and the evaluations before the first and after the tenth
    assert lines[0] == "step 0/12 | held-out 21.0%"
    assert lines[1].startswith("step 1/12 | reward 0.") and "kl " in lines[1] and "rollout 1." in lines[1]
    assert lines[11].startswith("step 10/12 | held-out ")


def test_the_live_display_shows_every_value_and_phase_and_fits_the_terminal(tmp_path):
    write_run(tmp_path, 40)
    for width in (60, 80, 140):
        console = text_console(True, width)
        assert progress.follow(tmp_path, console=console) == "finished"
        shown = console.file.getvalue()
        for label in ("reward", "held-out accuracy", "KL to reference", "rollout tokens/s", "step 40"):
            assert label in shown
        assert "rollout 1." in shown and "update 0." in shown and "checkpoint 0." in shown
        visible = [line for line in shown.splitlines() if "│" in line]
        assert max(len(line) for line in visible) <= width


def test_following_sees_steps_as_they_come_and_ends_when_told(tmp_path):
    over = threading.Event()
    console = text_console(False)
    status = []
    thread = threading.Thread(
        target=lambda: status.append(progress.follow(tmp_path, over.is_set, console=console, poll_s=0.02)),
        daemon=True,
    )
    thread.start()
    config = override(RunConfig(), ["logging.tensorboard=false"])
    metrics, phases = Metrics(tmp_path, config), Phases(tmp_path, total_steps=3)
    for step in (1, 2, 3):
        metrics.log(step, {"reward/mean": step / 10})
        deadline = time.time() + 10
        while f"step {step}/3 | reward 0.{step}00" not in console.file.getvalue():
            assert time.time() < deadline, console.file.getvalue()
            time.sleep(0.01)
    phases.finish("preempted")
    over.set()
    thread.join(10)
    assert status == ["preempted"]


def test_a_resume_is_announced_and_its_steps_are_shown_again(tmp_path):
    console = text_console(False)
    state = iter(range(100))

    def stop() -> bool:
        match next(state):
            case 1:
                write_run(tmp_path, 6)
            case 2:
                write_run(tmp_path, 7, resume_step=4)
            case 3:
                return True
        return False

    progress.follow(tmp_path, stop, console=console, poll_s=0.01)
    steps = [line.split("/")[0] for line in console.file.getvalue().splitlines()]
    assert steps == [f"step {n}" for n in (0, 1, 2, 3, 4, 5, 6, 5, 6, 7)]


def test_what_an_earlier_attempt_left_is_not_news(tmp_path):
    write_run(tmp_path, 6)  # progress.json says finished
    calls = iter([False, False, True])
    console = text_console(False)
    progress.follow(tmp_path, lambda: next(calls), console=console, poll_s=0.01)
    assert console.file.getvalue() == ""


def test_the_tail_waits_for_whole_lines_and_starts_anew_when_a_resume_cuts_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = progress.MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a/b"')
    assert tail.read() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b': 5}\n{"step": 3}\n')
    assert tail.read() == [{"step": 2, "a/b": 5}, {"step": 3}]
    assert [r["step"] for r in tail.history] == [1, 2, 3]
    Metrics(tmp_path, override(RunConfig(), ["logging.tensorboard=false"]), resume_step=1)
    assert tail.read() == [{"step": 1}]
    assert [r["step"] for r in tail.history] == [1]


def test_following_a_run_of_ten_thousand_steps_is_cheap(tmp_path):
    lines = [json.dumps({"step": i, "reward/mean": i / 1e4, "time/step_s": 1.0}) for i in range(10_000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tail = progress.MetricsTail(tmp_path / "metrics.jsonl")
    tail.read()
    started = time.process_time()
    tail.read()
    text_console(True).print(progress.render_display(tmp_path, {}, tail.history, 100))
    assert time.process_time() - started < 0.2


def test_durations_and_sparklines():
    durations = {3: "3 s", 200: "3 min 20 s", 8000: "2 h 13 min", 200_000: "2 d 7 h"}
    assert {seconds: progress.format_duration(seconds) for seconds in durations} == durations
    assert progress.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert progress.sparkline([0.0, 0.0, 4.0, 4.0], 2) == "▁█"
    assert progress.sparkline([1.0, float("nan"), 2.0], 10) == "▁ █"
    assert progress.sparkline([float("nan")], 10) == ""
    assert progress.sparkline([5.0, 5.0], 10) == "▁▁"


def test_eta_and_phases_are_means_of_the_last_steps(tmp_path):
    history = [
        {"step": 1, "time/step_s": 4.0, "time/rollout_s": 1.0, "time/of_a_rank_s": 9.0},
        {"step": 2, "time/step_s": 2.0},
    ]
    state = {"status": "running", "total_steps": 12}
    for known, left in ((history, "30 s to go"), ([{"step": 1}], "")):
        console = text_console(True)
        console.print(progress.render_display(tmp_path, state, known, 100))
        assert ("to go" in console.file.getvalue()) == bool(left) and left in console.file.getvalue()
    assert mean_seconds(history) == {"": [("rollout", 0.5), ("other", 2.5)]}


def test_a_missing_directory_is_one_line(tmp_path, capsys):
    assert progress.main([str(tmp_path / "none")]) == 2
    assert "no run at" in capsys.readouterr().err


def test_a_folder_that_takes_no_file_is_met_by_phases_and_not_by_who_hears_of_samples(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    phases = Phases(folder)
    (folder / "progress.json").unlink()
    folder.rmdir()
    phases.sampled()
    with pytest.raises(OSError):
        phases.note(message="loading the model")
