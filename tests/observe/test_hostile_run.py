"""A run's files that a stranger wrote: read as data, shown as text, and never at another file's cost."""

import io
import json
import random
import re

import pytest
from rich.console import Console
from written_run import picture, values, write_run

from trainer.config import RunConfig, override
from trainer.observe import compare, live, mirror, report
from trainer.observe.metrics import Metrics

SAMPLE = {"row": 0, "question": "q", "completion": "c", "verdict": "wrong", "images": [], "step": 1}
PLAIN = override(RunConfig(), ["logging.tensorboard=false"])


def sample_lines(folder, *names):
    (folder / "samples.jsonl").write_text(json.dumps(SAMPLE | {"images": list(names)}) + "\n")


def test_a_report_takes_no_file_but_images_of_the_runs_own_samples(tmp_path):
    folder = tmp_path / "runs" / "bought"
    Metrics(folder, PLAIN).log(1, {"reward/mean": 1.0})
    (folder / "samples").mkdir()
    (tmp_path / "secret-key").write_bytes(b"AKIA-very-secret")
    (tmp_path / "private.png").write_bytes(picture(3))
    (folder / "other.png").write_bytes(picture(4))
    (folder / "samples" / "text.png").write_bytes(b"AKIA-very-secret")
    (folder / "samples" / "page.png").write_bytes(b"<svg onload=alert(1)>")
    (folder / "samples" / "link.png").symlink_to(tmp_path / "private.png")
    (folder / "samples" / "good.svg").write_bytes(picture(5))
    bad = ("../../secret-key", "/etc/hostname", "../../private.png", "other.png")
    bad += ("samples/../../../private.png",)
    bad += ("samples/text.png", "samples/page.png", "samples/link.png", "samples/\0.png", "x" * 5000, 7, None)
    sample_lines(folder, *bad, "samples/good.svg")
    page = report.write_report(folder).read_text()
    images = re.findall(r'<img [^>]*src="([^"]*)"', page)
    assert len(images) == 1 and images[0].startswith("data:image/png;base64,")
    assert page.count('class="absent"') == len(bad)


@pytest.mark.parametrize(
    "number", ["-Infinity", "Infinity", "NaN", 1e308, -1e308, 10**400, "word", [1], None]
)
def test_no_number_of_a_run_costs_its_report_or_its_display(tmp_path, number):
    write_run(tmp_path, 6)
    names = values(1, 6, random.Random(1)).keys() | {"eval/accuracy", "time/unix_s", "fleet/workers"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, name in enumerate(sorted(names), 7):
            good = values(step, 60, random.Random(step)) | {"eval/accuracy": 0.5, "time/unix_s": 1.7e9}
            file.write(json.dumps({"step": step} | good | {name: number}) + "\n")
        file.write(json.dumps({"step": 99} | dict.fromkeys(names, number)) + "\n")
    page = report.write_report(tmp_path).read_text()
    assert "<h3>Reward</h3>" in page and "<h3>KL to the reference</h3>" in page
    assert "step 99/" in live.step_line(live.read_history(tmp_path)[-1], 99)
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    console.print(
        live.render_display(tmp_path, live.read_progress(tmp_path), live.read_history(tmp_path), 100)
    )


@pytest.mark.parametrize("step", ["3", None, -1, 1e300, 2.5, True, [1], 10**30])
def test_a_line_without_a_step_is_passed_over(tmp_path, step):
    Metrics(tmp_path, PLAIN).log(1, {"reward/mean": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": 0.5}) + "\n")
        file.write("[" * 100_000 + "\n")
    assert [line["step"] for line in live.read_history(tmp_path)] == [1]
    assert "<h3>Reward</h3>" in report.write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"reward": "a lot"},
        {"reward": "NaN", "advantage": "-Infinity"},
        {"advantage": [1]},
        {"tokens": "<b>"},
        {"step": "1"},
        {"step": [2]},
        {"verdict": ["wrong"]},
        {"verdict": 7},
        {"images": "samples"},
        {"images": None},
        {"images": {"a": 1}},
        {"shown": "12"},
        {"dialog": [1, 2, 3]},
        {"dialog": ["a", "b", "c"]},
        {"dialog": ["a", "b", "c"], "shown": [10**9]},
        {"dialog": ["a", "b", "c"], "shown": ["x"]},
        {"question": {"a": 1}, "completion": None, "row": "<u>", "rule": [1]},
    ],
)
def test_no_sample_costs_the_report(tmp_path, change):
    Metrics(tmp_path, PLAIN).log(1, {"reward/mean": 1.0})
    lines = [SAMPLE | change, SAMPLE | {"question": "the good one"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report.write_report(tmp_path).read_text()
    assert "the good one" in page and "<u>" not in page


FILES = {
    "progress.json": [
        "[]",
        "7",
        "[" * 100_000,
        '{"status": [1]}',
        '{"status": "\\u001b[31mfinished<b>", "total_steps": "many", "updated_unix_s": "x"}',
        '{"status": "running", "phase": 7, "phase_since_unix_s": "x", "lanes": 3}',
        '{"status": "running", "phase": "a", "lanes": {"b": 7}}',
        '{"status": "running", "phase": "a", "phase_since_unix_s": -1e308, "total_steps": 1e308}',
    ],
    "attempts.jsonl": ["7", '{"unix_s": 1e300, "resume_step": 3}', '{"unix_s": "x"}', '{"resume_step": "3"}'],
    "nodes.jsonl": [
        "{}",
        '{"node": 0, "unix_s": "x"}',
        '{"node": "0", "unix_s": 1.0, "gpus": 7}',
        '{"node": 0, "unix_s": 1.0, "gpus": [{"busy_fraction": "x"}], "ranks": {"a": 1}}',
        '{"node": 0, "unix_s": 1.0, "gpus": [{}], "cpu_fraction": "x", "ranks": []}',
        '{"node": 0, "unix_s": 1e400, "bytes_per_s": 7}',
    ],
    "fleet.json": ["[]", '{"workers": 7}', '{"workers": [7]}', '{"workers": [{"worker": 1}]}'],
    "cost.json": ["[]", '{"usd": "much"}', '{"usd": 1, "planned_usd": [1]}', "x"],
    "config.yaml": ["- 1", "run: 7", "\x00", "a: [", "!!python/object/apply:os.system [id]"],
}
FILES["attempts.jsonl"] += ["{}"]
FILES["config.yaml"] += ["7", "? [1]\n: 2", "expected: 7", "expected: {bands: [{metric: a}]}", "&a [*a]"]
CASES = [(name, text) for name, texts in FILES.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_no_file_of_a_run_costs_its_report_or_its_display(tmp_path, name, text):
    write_run(tmp_path, 6)
    (tmp_path / name).write_text(text + "\n")
    assert "<h3>Reward</h3>" in report.write_report(tmp_path).read_text()
    assert live.main([str(tmp_path), "--once"]) == 0
    page = compare.write_comparison([tmp_path, tmp_path], tmp_path / "both.html").read_text()
    assert "<h3>Reward: mean</h3>" in page


def test_what_a_run_says_of_itself_moves_no_cursor(tmp_path, capsys):
    write_run(tmp_path, 6)
    evil = "\x1b]0;owned\x07\x1b[2Jdone\u202e [red]x[/red] [/]"
    progress = json.loads((tmp_path / "progress.json").read_text())
    progress |= dict.fromkeys(("message", "restarts", "phase"), evil) | {"status": "running", "pid": 1}
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    worker = {"worker": evil, "device": evil, "lives": False, "why": evil, "completions": 3}
    (tmp_path / "fleet.json").write_text(json.dumps({"workers": [worker]}))
    assert live.main([str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "[red]x[/red] [/]" in out and "\x1b" not in out and "\u202e" not in out and "owned" not in out


ATTEMPT = {"epoch": 1, "name": "1-aaaaaa", "launch": "l", "committed": 0, "begun_unix_s": 1.7e9}


def test_a_bucket_puts_nothing_but_a_runs_own_files_into_the_readers_folder(tmp_path, capsys):
    bucket, here = tmp_path / "bucket", tmp_path / "runs" / "bought" / "pulled"
    stream = bucket / "bought" / "stream" / "1-aaaaaa"
    good = {"metrics.jsonl/00000000": b'{"step": 1, "reward/mean": 1.0}\n', "config.yaml": b"run: {}\n"}
    good |= {"progress.json": b'{"status": "finished"}', f"samples/{'a' * 16}.png": picture(2)}
    good |= {"launch.log/00000000": b"\x1b]0;owned\x07step 1\r\x1b[2Jdone\n"}
    bad = ("bucket", "cost.json", "report.html", "launch.json", "samples/evil.html")
    for name, data in good.items():
        (stream / name).parent.mkdir(parents=True, exist_ok=True)
        (stream / name).write_bytes(data)
    for name in bad:
        (stream / name).write_bytes(b"s3://evil")
    (bucket / "bought" / "stream" / "..x").write_bytes(b"x")
    record = ATTEMPT | {"host": "evil\u202edlrow", "left": "\u2066done"}
    (bucket / "bought" / "attempts").mkdir()
    (bucket / "bought" / "attempts" / "00000001.json").write_text(json.dumps(record))

    assert mirror.main(["logs", f"{bucket}/bought", str(here)]) == 0
    assert capsys.readouterr().out == "--- attempt 1-aaaaaa\nstep 1\ndone\n"
    files = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    written = {name for name in files if not name.startswith(".pieces")}
    assert written == {name.removesuffix("/00000000") for name in good}
    assert not any(name.endswith(bad) for name in files)

    assert mirror.main(["runs", str(bucket)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and "evildlrow" in out
    assert not set(out) & {"\x1b", "\x9b", "\u202e", "\u2066"}
