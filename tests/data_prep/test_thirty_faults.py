"""Every fault of a row in one data set, and places that cannot be written."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep import raw
from tests.data_prep.test_hostile_rows import HALF, HEIC, left_out, questions
from tests.data_prep.test_own import lines, run
from trainer.data.dataset import Dataset
from trainer.data.schema import question_text

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PREPARE = """
import re, sys
from data_prep import commands
code = commands.main(sys.argv[1:])
print(re.search("VmHWM:.*", open("/proc/self/status").read())[0])
sys.exit(code)
"""
NAMES = ["/../../above", "geometry/easy", "a\0b", "s" * 300, "..", ".", "a b", "../up", {"a": 1}, "\ud83d"]
SPLITS = [{"split": name} for name in NAMES]
FAULTS = {
    "bad_record": [
        *SPLITS,
        {"question": HALF},
        {"answer": HALF},
        {"solution": f"{HALF}, so \\boxed{{5}}"},
        {"source": HALF},
        {"image": "\ud83d.png"},
        {"pass_rate": "many"},
    ],
    "image_missing": [
        {"image": "A photo of a dog, sitting. " * 10_000},
        {"image": "x" * 300 + ".png"},
        {"image": "../" * 60_000 + "b.png"},
        {"image": "none.png"},
        {"image": str(raw.image(1))[:-200]},
        {"image": "caption\nof two lines"},
        {"image": "<PIL.PngImagePlugin.PngImageFile image mode=RGB size=4x4>"},
        {"image": "a\0b.png"},
        {"image": ["ok.png"] * 2 + ["/" * 5000]},
    ],
    "image_undecodable": [
        {"image": base64.b64encode(HEIC * 20).decode()},
        {"image": "data:image/heic;base64," + base64.b64encode(HEIC).decode()},
        {"image": base64.b64encode(b"%PDF-1.7" + bytes(200_000)).decode()},
        {"image": base64.b64encode(raw.image(2)[:300]).decode() + "A" * 1000},
    ],
    "image_refused": [
        {"image": "a/" * 60_000 + "b.png"},
        {"image": {"bytes": "no base64!"}},
        {"image": {"path": {"path": {"bytes": 5}}}},
        {"image": 17},
    ],
    "image_url": [{"image": "https://a.example/b.png"}],
    "bad_choices": [
        {"choices": [f"c{i}" for i in range(27)], "answer": "c1"},
        {"choices": [f"c{i}" for i in range(100)], "answer": "c1"},
        {"choices": ["a", "b"], "answer": "c"},
    ],
    "other_media": [
        {"video": "a.mp4"},
        {"videos": ["a.mp4"]},
        {"audio": {"bytes": "x", "path": None}},
        {"question": "<video> What happens?"},
        {"question": "<audio> What happens?"},
        {"question": "<VIDEO_1> What happens?"},
    ],
    "image_count": [{"question": "<image> and <image>?"}],
    "no_answer_field": [{"answer": None}],
    "no_question": [{"question": " "}],
    "special_token": [{"question": "<|im_end|> What?"}],
    "bad_answer": [{"answer": "$$"}],
}


def test_sound_rows_are_kept_and_every_fault_is_named(tmp_path):
    faults = [change for changes in FAULTS.values() for change in changes]
    none = {"video": None, "audio": {"bytes": None, "path": None}, "videos": []}
    sound = []
    for i in range(2 * len(faults)):
        record = {"question": f"How many squares, times {i}?", "answer": i} | none
        if i % 3 == 0:
            record["image"] = base64.b64encode(raw.image(i)).decode()
        sound.append(record)
    records = list(sound)
    records[1]["choices"], records[1]["answer"] = [f"choice {i}" for i in range(26)], "choice 25"
    records[2]["question"] += " Is 1 <|x| true?"
    for n, hostile in enumerate(questions(*faults)[8:]):
        records.insert(3 * n + 3, none | hostile)
    source, out = lines(tmp_path / "in" / "d.jsonl", records), tmp_path / "a" / "b" / "out"
    words = ["prepare", str(source), "--out", str(out), "--validation", "0"]
    command = [sys.executable, "-c", PREPARE, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak_kib = int(done.stdout.split()[-2])
    assert peak_kib * 1024 < 500 * MIB
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {source.parent, out}
    kept = list(Dataset(out))
    shown = [question_text(row.messages).partition("\n")[0] for row in kept]
    assert shown == [record["question"] for record in sound]
    assert [len(row.images) for row in kept] == [int("image" in record) for record in sound]
    assert left_out(out) == {reason: len(changes) for reason, changes in FAULTS.items()}


@pytest.mark.parametrize("option", ["--out", "--work"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys, option):
    source = lines(tmp_path / "d.jsonl", questions())
    places = {"--out": tmp_path / "out"} | {option: "/sys/kernel/spotrl"}
    words = [word for pair in places.items() for word in pair]
    assert run("prepare", source, *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data_prep:")]
    assert "/sys/kernel/spotrl" in line and "give --out (and --work) a folder that can be written" in line
