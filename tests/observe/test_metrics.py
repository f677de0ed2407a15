import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import typing
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from written_run import picture, write_run

from tests import metric_table
from trainer.algorithm.traces import Verdict
from trainer.config import RunConfig, load, override
from trainer.config.run_folder import read_lines, read_progress
from trainer.observe.history import read_history, reproducible_part, truncate_metrics
from trainer.observe.metrics import Metrics, thumbnail
from trainer.observe.phases import STARTED_VARIABLE, Phases, StartClock
from trainer.rewards.grading.expression import Rule

ROOT = Path(__file__).parents[2]
PLAIN = override(RunConfig(), ["logging.tensorboard=false"])


# --- metrics.jsonl ------------------------------------------------------------------------------------------


def test_a_line_is_plain_json_with_sorted_keys_and_exact_numbers(tmp_path):
    metrics = Metrics(tmp_path, PLAIN)
    numbers = {"reward/mean": 0.1 + 0.2, "kl/mean": torch.tensor(0.5), "loss/total": float("nan")}
    metrics.log(1, numbers | {"optim/updates": 3})
    line = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(line)
    assert list(record) == sorted(record) and line.endswith("}\n")
    assert record["reward/mean"] == 0.30000000000000004 and record["kl/mean"] == 0.5 and record["step"] == 1
    assert record["loss/total"] == "NaN"  # bare NaN is not JSON: a browser would refuse the whole file
    assert '"optim/updates": 3,' in line
    assert read_history(tmp_path)[0]["loss/total"] != read_history(tmp_path)[0]["loss/total"]


NAMES = [(name, 1.0, ValueError) for name in ("reward", "Reward/mean", "reward/", "a b/c")]


@pytest.mark.parametrize(("name", "value", "error"), [*NAMES, ("reward/mean", "high", TypeError)])
def test_a_name_without_a_section_and_what_is_no_number_are_refused(tmp_path, name, value, error):
    with pytest.raises(error, match="section/name" if error is ValueError else name):
        Metrics(tmp_path, PLAIN).log(1, {name: value})
    assert read_history(tmp_path) == []


def test_lines_of_one_step_are_merged_by_the_reader(tmp_path):
    metrics = Metrics(tmp_path, PLAIN)
    metrics.log(1, {"reward/mean": 1.0})
    metrics.log(1, {"eval/accuracy": 0.5})
    metrics.log(2, {"reward/mean": 2.0})
    one, two = read_history(tmp_path)
    assert (one["reward/mean"], one["eval/accuracy"], two["step"]) == (1.0, 0.5, 2)


def test_a_kill_at_any_moment_loses_at_most_the_line_it_tears(tmp_path):
    body = """
        import sys
        from trainer.config import RunConfig, override
        from trainer.observe.metrics import Metrics
        metrics = Metrics(sys.argv[1], override(RunConfig(), ["logging.tensorboard=false"]))
        for step in range(1, 10**9):
            metrics.log(step, {f"reward/name_{i}": step + i / 7 for i in range(40)})
            print(step, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if int(said) >= 200:
                break
        process.send_signal(signal.SIGKILL)
        acknowledged = max([int(said), *(int(line) for line in process.stdout if line.endswith("\n"))])
    history = read_history(tmp_path)
    assert [r["step"] for r in history] == list(range(1, len(history) + 1))
    assert len(history) >= acknowledged >= 200
    assert all(len(r) == 42 for r in history)


def test_a_torn_last_line_is_dropped_and_later_steps_are_cut_off_on_resume(tmp_path):
    write_run(tmp_path, 8)
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 9, "reward/me')
    assert read_history(tmp_path)[-1]["step"] == 8
    metrics = Metrics(tmp_path, PLAIN, resume_step=5)
    assert path.read_bytes().endswith(b"}\n")
    metrics.log(6, {"reward/mean": 1.0})
    assert [r["step"] for r in read_history(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert {r["step"] for r in read_lines(tmp_path / "samples.jsonl")} == {5}


def test_garbage_within_the_file_is_dropped_on_resume_and_passed_over_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n{"step": 2}\n[]\n{"step": 3}\n')
    assert [r["step"] for r in read_history(tmp_path)] == [1, 2, 3]
    assert truncate_metrics(path, 2) == 3
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_resumed_run_leaves_the_lines_of_one_that_was_never_stopped(tmp_path):
    write_run(tmp_path / "whole", 12)
    write_run(tmp_path / "cut", 12)
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1')
    write_run(tmp_path / "cut", 12, resume_step=7)
    whole, cut = ([reproducible_part(r) for r in read_history(tmp_path / name)] for name in ("whole", "cut"))
    assert whole == cut and len(whole) == 13
    assert [r["resume_step"] for r in read_lines(tmp_path / "cut" / "attempts.jsonl")] == [0, 7]
    assert "time/step_s" in read_history(tmp_path / "cut")[3] and "time/step_s" not in cut[3]


def test_a_fresh_start_drops_everything_of_an_earlier_run(tmp_path):
    write_run(tmp_path, 10, overrides=())
    write_run(tmp_path, 2, overrides=())
    assert [r["step"] for r in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert read_lines(tmp_path / "samples.jsonl") == []
    assert len(read_lines(tmp_path / "attempts.jsonl")) == 1
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_new_node_gets_the_history_from_the_checkpoint(tmp_path):
    write_run(tmp_path / "old", 8)
    saved = Metrics(tmp_path / "old", PLAIN, resume_step=6).history()
    samples = (tmp_path / "old" / "samples.jsonl").read_bytes()
    metrics = Metrics(tmp_path / "new", PLAIN, resume_step=6, history=saved, samples=samples)
    assert len(read_lines(tmp_path / "new" / "samples.jsonl")) == 4
    assert [r["step"] for r in read_history(tmp_path / "new")] == list(range(7))
    metrics.log(7, {"reward/mean": 1.0})
    # a local file that reaches as far is left as it is
    Metrics(tmp_path / "new", PLAIN, resume_step=7, history=saved)
    assert [r["step"] for r in read_history(tmp_path / "new")] == list(range(8))


def test_the_resolved_configuration_is_saved_with_the_run(tmp_path):
    config = override(PLAIN, ["run.name=here", "optimizer.learning_rate=3e-6"])
    Metrics(tmp_path, config)
    assert load(tmp_path / "config.yaml") == config


# --- samples ------------------------------------------------------------------------------------------------


def test_samples_keep_their_grades_and_each_picture_once(tmp_path):
    metrics = Metrics(tmp_path, PLAIN)
    row = {"row": 3, "question": "Wie viele – ü?", "completion": "2\n", "ground_truth": "2", "reward": 1.5}
    row |= {"verdict": "correct", "advantage": float("inf"), "tokens": 9}
    row["image_pngs"] = [picture(2), picture(3)]
    metrics.samples(5, [row, row])
    first, second = read_lines(tmp_path / "samples.jsonl")
    assert first == second and first["step"] == 5 and first["question"] == row["question"]
    assert first["advantage"] == "Infinity" and "image_pngs" not in first
    assert [(tmp_path / p).read_bytes() for p in first["images"]] == row["image_pngs"]
    assert len(list((tmp_path / "samples").iterdir())) == 2


def test_pictures_are_kept_small_and_are_those_that_the_policy_sees():
    """A transparent one on white, a turned one upright: a page would show the file otherwise."""
    small, suffix = thumbnail(picture(9, size=2000), 448)
    assert Image.open(BytesIO(small)).size == (448, 448) and suffix == ".jpeg" and len(small) < 30_000
    assert thumbnail(picture(1), 448) == (picture(1), ".png")
    clear, turned = BytesIO(), BytesIO()
    exif = Image.Exif()
    Image.new("RGBA", (40, 20), (0, 0, 0, 0)).save(clear, "PNG")
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), "red").save(turned, "JPEG", exif=exif)
    shown = [Image.open(BytesIO(thumbnail(data.getvalue(), 448)[0])) for data in (clear, turned)]
    assert [image.size for image in shown] == [(40, 20), (20, 40)]
    assert shown[0].convert("RGB").getpixel((5, 5)) == (255, 255, 255)


# --- phases -------------------------------------------------------------------------------------------------


def test_phases_are_timed_exclusively_and_taken_once():
    phases = Phases()
    with phases("rollout"):
        time.sleep(0.05)
        with phases("grade"):
            time.sleep(0.1)
        time.sleep(0.05)
    with phases("grade"):
        time.sleep(0.05)
    time.sleep(0.05)
    taken = phases.take()
    assert set(taken) == {"time/rollout_s", "time/grade_s", "time/step_s"}
    assert taken["time/rollout_s"] == pytest.approx(0.10, abs=0.04)
    assert taken["time/grade_s"] == pytest.approx(0.15, abs=0.04)
    assert taken["time/step_s"] == pytest.approx(0.30, abs=0.08)
    assert taken["time/rollout_s"] + taken["time/grade_s"] < taken["time/step_s"]
    again = phases.take()
    assert set(again) == {"time/step_s"} and again["time/step_s"] < 0.05


def test_the_first_step_begins_at_begin_and_a_later_one_where_the_last_ended():
    phases = Phases()
    with phases("start"):
        time.sleep(0.05)
    phases.begin(1)
    assert set(phases.take()) == {"time/step_s"}
    with phases("checkpoint"):
        time.sleep(0.05)
    phases.begin(2)
    taken = phases.take()
    assert 0.05 <= taken["time/checkpoint_s"] <= taken["time/step_s"]


def test_the_parts_add_up_to_the_start():
    clock = StartClock({STARTED_VARIABLE: str(time.time() - 40)})
    for part in ("launch", "place", "load"):
        clock.mark(part)
    metrics = clock.metrics()
    assert metrics["perf/start_launch_s"] == pytest.approx(40, abs=2) and len(metrics) == 4
    assert metrics.pop("perf/start_s") == pytest.approx(sum(metrics.values()), abs=1e-6)
    assert str(clock).startswith("ready 40.") and StartClock({}).metrics() == {"perf/start_s": 0.0}


def test_the_boundary_is_polled_after_outermost_phases_that_ended_well_and_may_stop_the_loop():
    seen = []
    phases = Phases(on_boundary=lambda name: seen.append(name) or 1 / (len(seen) < 2))
    with phases("rollout"), phases("grade"):
        pass
    with pytest.raises(KeyError), phases("update"):
        raise KeyError
    assert seen == ["rollout"] and "time/update_s" in phases.take()
    with pytest.raises(ZeroDivisionError), phases("sync"):
        pass
    assert "time/sync_s" in phases.take()


def test_another_process_can_read_which_phase_runs(tmp_path):
    phases = Phases(tmp_path, total_steps=50)
    assert read_progress(tmp_path)["status"] == "running"
    phases.begin(7)
    with phases("rollout"):
        seen = read_progress(tmp_path)
        stamp = seen["step"], seen["phase"], seen["total_steps"], seen["pid"]
        assert stamp == (7, "rollout", 50, os.getpid())
        with phases("sync"):
            assert read_progress(tmp_path)["phase"] == "sync"
        assert read_progress(tmp_path)["phase"] == "rollout"
    phases.note(message="saving")
    assert read_progress(tmp_path)["message"] == "saving"
    phases.finish("preempted")
    assert read_progress(tmp_path)["status"] == "preempted"
    assert [p.name for p in tmp_path.iterdir()] == ["progress.json"]
    assert read_progress(tmp_path / "none") == {}


# --- the table ----------------------------------------------------------------------------------------------


def test_the_table_names_what_the_trainer_writes_and_nothing_else():
    """A name that is new in the code belongs into docs/metrics.md."""
    sections = {name.split("/")[0] for name in metric_table.NAMES}
    written = {"time/step_s", "time/unix_s", "time/checkpoint_s"} | {
        f"reward/{v}_rate" for v in typing.get_args(Verdict)
    }
    written |= {f"reward/decided_{rule}" for rule in typing.get_args(Rule)}
    written |= {"time/wait_s", "time/sampling_s"}  # of a run with two lanes
    for path in (ROOT / "trainer").rglob("*.py"):
        source = path.read_text()
        written |= {n for n in re.findall(r'"([a-z]+/[a-z_0-9]+)"', source) if n.split("/")[0] in sections}
        if path.name in ("grpo.py", "sampling_schedule.py", "sft.py"):
            written |= {f"time/{phase}_s" for phase in re.findall(r'phases\("([a-z]+)"\)', source)}
        written |= {f"perf/start_{part}_s" for part in re.findall(r'clock.mark\("([a-z]+)"\)', source)}
    written |= {"time/rollout_s"}
    assert metric_table.unknown_names(written) == []
    assert sorted(set(metric_table.NAMES) - written) == []
