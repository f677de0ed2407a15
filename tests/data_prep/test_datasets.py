"""Every dataset from a loopback hub to a prepared directory or bucket, through the command line."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import command_options, commands
from data_prep.sources.catalog import CATALOG
from tests import servers
from tests.data_prep import hub_server, raw
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text


def parquet(rows: list[dict]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def image(seed: int) -> dict:
    return {"bytes": raw.image(seed), "path": f"{seed}.png"}


GSM8K = {
    "question": "Ann has 6 bags of 207 nuts. How many nuts?",
    "answer": "She has 6*207 = <<6*207=1242>>1242 nuts.\n#### 1,242",
}
VISTA = {
    "pid": "1",
    "query": "Hint: Give the letter.\nQuestion: Which?\nChoices:\n(A) 12\n(B) 14",
    "choices": ["12", "14"],
    "answer": "14",
    "question_type": "multi_choice",
    "metadata": {"source": "IconQA"},
    "decoded_image": image(1),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield running


def run(*arguments) -> int:
    return commands.main([str(argument) for argument in arguments])


def test_gsm8k(hub, tmp_path, capsys):
    other = {"question": "No mark?", "answer": "It is 3."}
    commit = hub.add(
        "openai/gsm8k",
        {
            "main/train-00000-of-00001.parquet": parquet([GSM8K, other]),
            "main/test-00000-of-00001.parquet": parquet(
                [{"question": "2 + 2?", "answer": "<<2+2=4>>4\n#### 4"}]
            ),
            "socratic/train-00000-of-00001.parquet": parquet([GSM8K]),
        },
    )
    assert run("prepare", "gsm8k", "--out", tmp_path / "out") == 0
    rows = [list(Dataset(tmp_path / "out", split)) for split in ("train", "test")]
    assert [len(split) for split in rows] == [1, 1]
    first = rows[0][0]
    assert (first.answer, first.answer_type, first.images, first.source) == ("1242", "number", [], "gsm8k")
    assert first.solution == "<think> She has 6*207 = 1242 nuts. </think><answer> $\\boxed{1242}$ </answer>"
    assert (
        question_text(first.messages) == GSM8K["question"] and "picture" not in first.messages[0]["content"]
    )
    manifest = read_manifest(tmp_path / "out")
    assert manifest.revision == commit and manifest.quarantined == {"no_answer_field": 1}
    assert [f["path"] for f in manifest.settings["sources"][0]["files"]] == [
        "main/train-00000-of-00001.parquet",
        "main/test-00000-of-00001.parquet",
    ]
    assert "gsm8k: train 1, test 1 rows" in capsys.readouterr().out


def chat(text: str, truth: str, **more) -> dict:
    """A row of verl's columns, as OpenMMReasoner and Vero have them."""
    prompt = [{"role": "user", "content": text}]
    return {
        "prompt": prompt,
        "data_source": "tqa",
        "reward_model": {"style": "rule", "ground_truth": truth},
        **more,
    }


def vero(truth: str, reward: str) -> dict:
    return chat(
        "<image>How many?", truth, image=image(4), extra_info={"reward_type": reward, "tolerance": None}
    )


ASKED = {"question": "<image>How many?", "answer": "7"}
ALPACA = {"instruction": "Add.", "input": "3 and 4", "output": "The sum is seven. " * 20, "text": "Below..."}
MMMU = {"answer": "B", "options": "['x', 'y']", "subject": "Art", "question": "Which in <image 1>?"}
MMMU |= {f"image_{i}": image(1) if i == 1 else None for i in range(1, 8)}
VISION = {"question": "How many?\n<image1>", "answer": "7", "options": [], "decoded_image": image(1)}
VISION |= {"subject": "counting", "image": "images/1.jpg", "level": 2}
VERSE = {"query_cot": "How many?", "answer": "7", "image": image(1), "problem_version": "Text Lite"}
SCALER = {"problem": "1+6?", "answer": "7", "solution": "It is $\\boxed{7}$"}
TRAIN, TEST = "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"
MATH = {"problem": "Which?", "level": "Level 1", "type": "Algebra", "solution": "None"}
PICTURED = {"images": [image(1)], "problem": "<image>Find x.", "answer": "7"}
LEFT_OUT = {
    "vero": {"other_reward": 1},
    "math": {"no_answer_field": 1, "conflicting_answers": 1},
    "geometry3k": {"image_count": 1, "image_undecodable": 1},
}
PUBLISHED = {
    "math": {
        "algebra/train-00000-of-00001.parquet": [MATH | {"solution": "So $\\boxed{7}$"}, MATH],
        "geometry/train-00000-of-00001.parquet": [
            MATH | {"problem": "Why?", "solution": "so \\fbox{$7$}, that is $\\boxed{7}$"}
        ],
        "algebra/test-00000-of-00001.parquet": [MATH | {"solution": "$\\boxed{1}$, no: \\fbox{$7$}"}],
    },
    "geometry3k": {
        TRAIN: [PICTURED, PICTURED | {"problem": "<image>One <image>Two"}],
        "data/validation-00000-of-00001.parquet": [PICTURED | {"images": [image(2)]}],
        TEST: [PICTURED | {"images": [{"bytes": b"broken", "path": "x"}]}],
    },
    "virl39k": {
        "39Krelease.parquet": [ASKED | {"image": ["images/1.png"], "category": "Geo", "PassRate_7BBase": 0.5}]
    },
    "mmk12": {
        TRAIN: [ASKED | {"image": image(1), "subject": "math"}],
        TEST: [ASKED | {"image": image(2), "subject": "physics"}],
    },
    "clevr": {TRAIN: [{"image": image(1), "problem": "How many items?", "solution": "<answer> 7 </answer>"}]},
    "deepscaler": {"deepscaler.json": [SCALER]},
    "openmmreasoner": {f"tqa/{TRAIN[5:]}": [chat("<image>How many?", "7", images=[image(3)])]},
    "vero": {
        f"stem/{TRAIN[5:]}": [vero("7", "numeric"), vero("[[1, 2, 3, 4]]", "grounding")],
        "stem/val-00000-of-00001.parquet": [vero("7", "string_match")],
    },
    "alpaca": {"data/train-00000-of-00001-a0.parquet": [ALPACA]},
    "gsm8k-test": {f"main/{TEST[5:]}": [{"question": "3+4?", "answer": "<<3+4=7>>7\n#### 7"}] * 2},
    "geometry3k-test": {TEST: [{"images": [image(1)], "problem": "<image>How many?", "answer": "7"}]},
    "mathverse": {"testmini.parquet": [VERSE]},
    "mathvision": {TEST: [VISION]},
    "mmmu-pro": {"standard (10 options)/test-00000-of-00001.parquet": [MMMU]},
    "math-500": {"test.jsonl": [SCALER | {"subject": "Algebra", "unique_id": "test/1.json", "level": 1}]},
}


def file_of(path: str, rows: list[dict]) -> bytes:
    """A file of the hub, as its name says."""
    if path.endswith(".parquet"):
        return parquet(rows)
    return json.dumps(rows if path.endswith(".json") else rows[0]).encode()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_other_published_sets_by_their_columns(name, hub, tmp_path):
    files = {path: file_of(path, rows) for path, rows in PUBLISHED[name].items()}
    if name == "virl39k":
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.writestr("images/1.png", raw.image(1))
        files["images.zip"] = archive.getvalue()
    commit = hub.add(CATALOG[name].repo, files)
    assert run("prepare", name, "--out", tmp_path / "out", "--validation", 0) == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.revision == commit
    rows = [row for split in manifest.rows for row in Dataset(tmp_path / "out", split)]
    if name == "alpaca":
        assert (
            question_text(rows[0].messages) == "Add.\n\n3 and 4"
            and rows[0].solution == "The sum is seven. " * 20
        )
        assert rows[0].answer == "" and len(rows[0].messages) == 1
        return
    assert {row.answer for row in rows} == {"B" if name == "mmmu-pro" else "7"}
    left_out = LEFT_OUT.get(name, {})
    assert len(rows) == sum(map(len, PUBLISHED[name].values())) - sum(left_out.values())
    assert manifest.quarantined == left_out
    pictured = any("image" in column for record in next(iter(PUBLISHED[name].values())) for column in record)
    assert all(len(row.images) == pictured for row in rows)
    if CATALOG[name].evaluation:
        assert set(manifest.rows) == {"test"}
    if name == "mathvision":
        assert rows[0].extra["level"] == 2


def test_mathvista_and_the_overlap_with_it(hub, tmp_path, capsys):
    free = VISTA | {
        "query": "How many?",
        "choices": None,
        "answer": "1.2",
        "question_type": "free_form",
        "metadata": {"source": "Geometry3K"},
        "decoded_image": image(2),
    }
    odd = VISTA | {"answer": "13", "decoded_image": image(3)}
    hub.add(
        "AI4Math/MathVista",
        {
            "data/testmini-00000-of-00001-725687bf7a18d64b.parquet": parquet([VISTA, free, odd]),
            "data/test-00000-of-00002-6b81bd7f7e2065e6.parquet": parquet([VISTA]),
        },
    )
    assert run("prepare", "mathvista", "--out", tmp_path / "vista") == 0
    rows = list(Dataset(tmp_path / "vista", "test"))
    assert [(row.source, row.answer, row.answer_type) for row in rows] == [
        ("mathvista/IconQA", "B", "letter"),
        ("mathvista/Geometry3K", "1.2", "number"),
        ("mathvista/IconQA", "13", "number"),
    ]
    assert question_text(rows[0].messages) == VISTA["query"]
    assert read_manifest(tmp_path / "vista").quarantined == {}
    fields = ("pid", "choices", "question_type", "metadata")
    assert rows[0].extra == {name: VISTA[name] for name in fields}

    jsonl, archive = raw.mathv60k(tmp_path / "raw")  # image 2 is there too, under IconQA
    own = ("prepare", jsonl, "--name", "mathv60k", "--images", archive, "--validation", 0)
    assert run(*own, "--out", tmp_path / "all") == 0
    capsys.readouterr()
    assert run("overlap", tmp_path / "all", tmp_path / "vista") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["rows_near"], report["evaluation_rows"]) == (12, 3, 3)
    assert report["evaluation_rows_touched"] == {"mathvista/IconQA": 2, "mathvista/Geometry3K": 1}
    assert report["same_sources"] == {"IconQA": {"rows": 6, "evaluation_rows": 2}}
    assert run(*own, "--out", tmp_path / "clean", "--exclude", tmp_path / "vista") == 0
    assert read_manifest(tmp_path / "clean").quarantined == {"overlap": 3}
    assert "mathvista: 3 rows left out, with images of 3 of its rows" in capsys.readouterr().out


def test_mathv60k_from_hub_and_mirror_is_the_same_dataset(hub, tmp_path):
    jsonl, archive = raw.mathv60k(tmp_path / "raw")
    files = {jsonl.name: jsonl.read_bytes(), archive.name: archive.read_bytes()}
    hub.add("VLM-Reasoner/VerMulti", files)
    assert run("prepare", "mathv60k", "--out", tmp_path / "a", "--validation", 0.3) == 0
    mirror = tmp_path / "mirror" / "VLM-Reasoner" / "VerMulti"
    mirror.mkdir(parents=True)
    for name, data in files.items():
        (mirror / name).write_bytes(data)
    here = "--mirror", tmp_path / "mirror"
    assert run("prepare", "mathv60k", "--out", tmp_path / "b", *here, "--validation", 0.3) == 0
    first, second = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert [f["sha256"] for f in first.files] == [f["sha256"] for f in second.files]
    assert first.revision == hub.heads["VLM-Reasoner/VerMulti"] and second.revision == ""


def test_straight_to_a_bucket_and_read_from_there(tmp_path, monkeypatch):
    jsonl, archive = raw.mathv60k(tmp_path / "raw")
    monkeypatch.setenv("SPOTRL_CACHE", str(tmp_path / "cache"))
    with servers.rclone(tmp_path / "bucket-files") as server:
        for key, value in server.env.items():
            monkeypatch.setenv(key, value)
        url = "s3://bucket/data/mathv60k"
        words = ("prepare", jsonl, "--name", "mathv60k", "--images", archive, "--validation", 0, "--out")
        own = (*words, url)
        assert run(*own) == 0 and run(*words, tmp_path / "local") == 0
        assert list(Dataset(url)) == list(Dataset(tmp_path / "local"))
        assert Dataset(url).fingerprint == Dataset(tmp_path / "local").fingerprint
        assert not list((tmp_path / "cache").glob("staging-*"))
        assert run(*own) == 2
        assert run(*own, "--overwrite", "--limit", 5) == 0
        assert len(Dataset(url)) == 5
        shard = next((tmp_path / "bucket-files").rglob("train-*.parquet"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        for cached in (tmp_path / "cache").rglob("*.parquet"):
            cached.unlink()
        assert run("verify", url) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("prepare mathv --out x", "no file, folder or dataset 'mathv' (looked in"),
        ("prepare --out x", "name a source: a file, a folder, OWNER/NAME on the hub, or one of mathv60k"),
        ("mix gsm8k=much --out x", "after = stands a weight"),
        ("prepare gsm8k mathvista --out x", "training and evaluation sets are prepared apart"),
        ("prepare . --out x", ". has no data file: one of .jsonl"),
        ("prepare . --out x --map problem=question", "--map problem=question: write ROLE=COLUMN"),
        ("filter /nowhere --out x --pass-rate 0.9..0.1", "give two shares such as 0.1..0.9"),
        ("mix /nowhere --out x", "no prepared dataset at /nowhere"),
        ("prepare gsm8k --out x --validation 1.5", "--validation 1.5"),
        ("prepare gsm8k --out x --mirror /nowhere", "the mirror has no folder"),
        ("verify /nowhere", "no prepared dataset at /nowhere"),
        ("filter x --out y", "Missing option '--pass-rate'; see `python3 launch.py data filter --help`"),
        ("nothing", "No such command 'nothing'"),
        ("", "Missing command; see `python3 launch.py data --help`"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(line, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(line)) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_help_is_quick_and_imports_neither_torch_nor_ray():
    code = (
        "import sys, data_prep.commands as c, data_prep.prepare, data_prep.sources.catalog,"
        " trainer.rewards.grading.grader;print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'sympy')"
        " if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    text = subprocess.run(
        [sys.executable, "-m", "data_prep", "--help"], capture_output=True, text=True
    ).stdout
    assert "mathv60k" in text and "your own data" in text and "quarantine.jsonl" in text


def test_the_help_names_every_set_of_the_catalog():
    assert tuple(CATALOG) == command_options.NAMES
