"""A data set of 200 rows with 30 faults, and places that cannot be written."""

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
TURNS = [{"role": "user", "content": HALF}, {"role": "assistant", "content": "5"}]
FAULTS = {
    "bad_record": [
        {"split": "/../../above"},
        {"split": "a\0b"},
        {"split": "s" * 300},
        {"question": HALF},
        {"answer": HALF},
        {"solution": f"{HALF}, so \\boxed{{5}}"},
        {"source": HALF},
        {"image": "\ud83d.png"},
        {"pass_rate": "many"},
    ],
    "image_missing": [
        {"image": "A photo of a dog, sitting. " * 10_000},
        {"image": "x" * 300},
        {"image": "../" * 50_000},
        {"image": "none.png"},
        {"image": str(raw.image(1))[:-100]},
    ],
    "image_undecodable": [
        {"image": base64.b64encode(HEIC * 20).decode()},
        {"image": base64.b64encode(b"%PDF-1.7" + bytes(200_000)).decode()},
        {"image": base64.b64encode(raw.image(2)[:300]).decode() + "A" * 1000},
    ],
    "image_refused": [{"image": {"bytes": "no base64!"}}, {"image": 17}],
    "image_url": [{"image": "https://a.example/b.png"}],
    "bad_choices": [
        {"choices": [f"c{i}" for i in range(27)], "answer": "c1"},
        {"choices": ["a", "b"], "answer": "c"},
    ],
    "other_media": [{"video": "a.mp4"}, {"audio": ["a.wav"]}, {"question": "<video> What happens?"}],
    "image_count": [{"question": "<image> and <image>?"}],
    "no_answer_field": [{"answer": None}],
    "no_question": [{"question": " "}],
    "special_token": [{"question": "<|im_end|> What?"}],
    "bad_answer": [{"answer": "$$"}],
}


def test_a_hundred_and_seventy_of_two_hundred_rows_are_kept_and_thirty_are_named(tmp_path):
    faults = [change for changes in FAULTS.values() for change in changes]
    assert len(faults) == 30
    sound = []
    for i in range(170):
        record = {"question": f"How many squares, times {i}?", "answer": i}
        if i % 3 == 0:
            record["image"] = base64.b64encode(raw.image(i)).decode()
        sound.append(record)
    records = list(sound)
    records[1]["choices"], records[1]["answer"] = ["1", "2"], "2"
    records[2]["question"] += " Is 1 <|x| true?"
    for n, hostile in enumerate(questions(*faults)[8:]):
        records.insert(6 * n + 3, hostile)
    source, out = lines(tmp_path / "d.jsonl", records), tmp_path / "out"
    words = ["prepare", str(source), "--out", str(out), "--validation", "0"]
    command = [sys.executable, "-c", PREPARE, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak_kib = int(done.stdout.split()[-2])
    assert peak_kib * 1024 < 500 * MIB
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
