"""Hostile rows, files, pictures, messages and code through the doors by which people's things come in.

    python -m benchmarks.doors [--minutes 60] [--out benchmarks/doors.json]

Each input gives the right thing or a named reason: `right` or `named` is counted. An exception that is no
reason is a traceback; a sound row, completion or image that is lost or another one is silent.
tests/data_prep/test_doors.py holds the same for seconds.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import random
import resource
import shutil
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import code_doors
from benchmarks.hostile import (
    SOUND,
    TEXTS,
    Draw,
    Silent,
    drawing,
    expect,
    hostile_record,
    hostile_value,
    mutated,
    named,
    sound_records,
)
from benchmarks.machine import processor
from data_prep import commands
from data_prep.ingest.archive import Refused, members
from data_prep.sources.own_files import own
from data_prep.sources.row_source import BadRow, Candidate
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text


def read_rows(path: Path) -> list[Candidate | BadRow]:
    """All rows of a file, twice alike; every row and every reason can be written."""
    rows: list[Candidate | BadRow] = []
    for source in own(path):
        first = list(source.rows())
        expect(str(first) == str(list(source.rows())), "two readings differ")
        rows += first
    for row in rows:
        values = vars(row) if isinstance(row, Candidate) else ascii(vars(row))
        json.dumps(values, ensure_ascii=False).encode()
    return rows


def expect_sound(rows: list[Candidate | BadRow], records: list[dict[str, Any]], total: int) -> str:
    """Whether all sound records are among the rows, and every record is one row."""
    kept = {(question_text(row.messages), row.answer) for row in rows if isinstance(row, Candidate)}
    for record in records:
        expect((record["question"], record["answer"]) in kept, f"a sound row is lost: {record}")
    expect(len(rows) == total, f"{len(rows)} rows of {total} records")
    return "named" if any(isinstance(row, BadRow) for row in rows) else "right"


def json_lines(draw: Draw, folder: Path) -> str:
    """Records of any values, and lines of any bytes, between sound ones."""
    sound = sound_records(draw)
    lines = [json.dumps(record).encode() for record in sound]
    count = draw.choice((1, 1, 2))
    for _ in range(count):
        line = json.dumps(hostile_record(draw)).encode()
        line = mutated(draw, line) if draw.random() < 0.3 else line
        line = line.replace(b"\n", b" ").replace(b"\r", b" ")
        lines.insert(draw.randrange(len(lines) + 1), line if line.strip() else b"{}")
    (folder / "d.jsonl").write_bytes(b"\n".join(lines))
    return expect_sound(read_rows(folder / "d.jsonl"), sound, SOUND + count)


def table(draw: Draw, folder: Path) -> str:
    """A line of any characters between sound ones, half of them with quotes."""
    ending, between = draw.choice((("csv", ","), ("tsv", "\t"), ("csv", ";")))
    sound = sound_records(draw)
    lines = [f"question{between}answer"]
    for record in sound:
        record["question"] = record["question"].replace("plus", 'he said "plus"')
        lines.append('"{}"{}{}'.format(record["question"].replace('"', '""'), between, record["answer"]))
    line = list(f"A hostile line{between}7")
    for _ in range(draw.choice((1, 2, 4))):
        line.insert(
            draw.randrange(len(line) + 1), draw.choice(('"', "'", between, "\\", '""', "\0", "é", "x"))
        )
    lines.insert(draw.randrange(1, len(lines) + 1), "".join(line))
    path = folder / f"d.{ending}"
    path.write_text("\n".join(lines))
    return expect_sound(read_rows(path), sound, SOUND + 1)


def parquet(draw: Draw, folder: Path) -> str:
    """A row with bytes that are no text, or no image, between sound ones."""
    sound = sound_records(draw)
    rows = [(record["question"].encode(), record["answer"].encode(), None) for record in sound]
    image = {
        "bytes": draw.choice((None, mutated(draw, drawing(draw)))),
        "path": draw.choice(TEXTS).encode(errors="replace"),
    }
    hostile = mutated(draw, b"What is it, then?"), mutated(draw, b"12"), image
    rows.insert(draw.randrange(len(rows) + 1), hostile)
    questions, answers, images = zip(*rows, strict=True)
    columns = [pa.array(texts, pa.binary()).view(pa.string()) for texts in (questions, answers)]
    columns.append(pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.binary())])))
    pq.write_table(pa.table(columns, names=["question", "answer", "image"]), folder / "d.parquet")
    return expect_sound(read_rows(folder / "d.parquet"), sound, SOUND + 1)


def whole_file(draw: Draw, folder: Path) -> str:
    """A data file of any kind whose bytes were changed anywhere."""
    path = folder / ("d" + draw.choice((".jsonl", ".json", ".csv", ".tsv", ".parquet")))
    records = []
    for record in [*sound_records(draw), hostile_record(draw)]:
        texts = {name: str(record.get(name)) for name in ("question", "answer")}
        records.append({name: text.encode(errors="replace").decode() for name, text in texts.items()})
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
        data = path.read_bytes()
    else:
        between = {".csv": ",", ".tsv": "\t"}.get(path.suffix)
        rows = [between.join(record.values()) if between else json.dumps(record) for record in records]
        text = json.dumps(records) if path.suffix == ".json" else "\n".join(rows)
        head = f"question{between}answer\n" if between else ""
        data = (head + text).encode(draw.choice(("utf-8", "utf-16", "latin-1", "utf-32")), "replace")
    path.write_bytes(mutated(draw, data))
    with named():
        read_rows(path)
        return "right"
    return "named"


def archive(draw: Draw, folder: Path) -> str:
    """An archive whose bytes or names were changed."""
    path = folder / draw.choice(("a.zip", "a.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz"))
    hostile = ("../up.png", "/abs.png", "x" * 300, "b\\c", "n\0", "ä.png", "a/" * 3000, ".")
    names = ["a/1.png", draw.choice(hostile)]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as written:
            for name in names:
                written.writestr(name, drawing(draw))
    else:
        with tarfile.open(path, "w" if path.suffix == ".tar" else f"w:{path.suffix[1:]}") as packed_files:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 100
                info.type = draw.choice((tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE))
                info.linkname = draw.choice(("a/1.png", "../../x", "/etc/passwd", name))
                packed_files.addfile(info, io.BytesIO(draw.randbytes(100)))
    if draw.random() < 0.8:
        path.write_bytes(mutated(draw, path.read_bytes()))
    with named():
        for member in members(path, Refused()):
            expect(not member.name.startswith("/") and ".." not in member.name.split("/"), member.name)
            expect(member.link or len(member.read()) == member.size, "a member that is shorter than it says")
        return "right"
    return "named"


def manifest(draw: Draw, folder: Path) -> str:
    """The manifest of a bucket."""
    file = {
        "path": "train-00000-of-00001.parquet",
        "split": "train",
        "rows": 5,
        "bytes": 9,
        "sha256": "a" * 64,
    }
    values = {"name": "d", "revision": "", "rows": {"train": 5}, "files": [file], "fingerprint": "a" * 64}
    values |= {
        "images_per_row": {"train": 1},
        "quarantined": {},
        "settings": {},
        "statistics": {},
        "format": 2,
    }
    changed = draw.choice((values, file))
    changed[draw.choice(list(changed))] = hostile_value(draw)
    data = json.dumps(values).encode()
    (folder / "manifest.json").write_bytes(mutated(draw, data) if draw.random() < 0.3 else data)
    with named():
        read = read_manifest(folder)
        for name in (*read.rows, *(entry["path"] for entry in read.files)):
            expect(
                "/" not in name and not name.startswith("."), f"a name that leads out of the folder: {name}"
            )
        with contextlib.suppress(ConfigError):
            Dataset(folder)
        return "right"
    return "named"


def prepared(draw: Draw, folder: Path) -> str:
    """A whole preparation: hostile rows between sound ones, half of them with images, by the command line."""
    sound = sound_records(draw, 40)
    records = []
    for i, record in enumerate(sound):
        records.append(record | {"image": base64.b64encode(drawing(draw)).decode() if i % 2 else None})
    for _ in range(20):
        records.insert(draw.randrange(len(records) + 1), hostile_record(draw))
    path, out = folder / "d.jsonl", folder / "out"
    path.write_text("\n".join(map(json.dumps, records)))
    stated = io.StringIO()
    with contextlib.redirect_stdout(stated), contextlib.redirect_stderr(stated):
        code = commands.main(["prepare", str(path), "--out", str(out), "--validation", "0", "--workers", "1"])
    expect(code == 0, f"exit code {code}: {stated.getvalue()[-500:]}")
    known = read_manifest(out)
    kept = {question_text(row.messages).strip() for split in known.rows for row in Dataset(out, split)}
    lost = [record for record in sound if record["question"] not in kept]
    counts = sum(known.rows.values()) + sum(known.quarantined.values())
    expect(not lost and counts == len(records), f"lost {lost[:2]}, {counts} of {len(records)} counted")
    outside = [file for file in out.rglob("*") if file.is_file() and file.parent != out]
    expect(not outside, f"files outside of the folder: {outside}")
    return "named" if known.quarantined else "right"


DOORS: dict[str, Callable[[Draw, Path], str]] = {
    "JSON lines": json_lines,
    "tables": table,
    "Parquet rows": parquet,
    "data files": whole_file,
    "archives": archive,
    "pictures": code_doors.picture,
    "observations of tools": code_doors.observation,
    "messages of tools": code_doors.message,
    "manifests": manifest,
    "whole preparations, 20 hostile rows each": prepared,
    "pictures of requests": code_doors.requested_picture,
    "reward functions": code_doors.reward_function,
    "environments": code_doors.own_environment,
    "files of code": code_doors.code,
}
ROUND = {prepared: 1, code_doors.reward_function: 8, code_doors.own_environment: 8, code_doors.code: 2}
"""Inputs of a door in one turn, where they take longer than milliseconds."""


def fuzz(minutes: float, seed: int) -> dict[str, Any]:
    """Runs all doors in turns."""
    outcomes: dict[str, Counter[str]] = {door: Counter() for door in DOORS}
    faults: list[str] = []
    end = time.monotonic() + 60 * minutes
    turn = 0
    while time.monotonic() < end:
        turn += 1
        inputs = [(door, n) for door, through in DOORS.items() for n in range(ROUND.get(through, 40))]
        for door, number in inputs:
            folder = Path(tempfile.mkdtemp())
            try:
                outcomes[door][DOORS[door](random.Random(f"{seed}/{door}/{turn}/{number}"), folder)] += 1
            except Exception as error:
                outcomes[door]["silent" if isinstance(error, Silent) else "tracebacks"] += 1
                faults.append(f"{seed}/{door}/{turn}/{number}: {traceback.format_exc(limit=-4)}"[:1500])
            shutil.rmtree(folder)
    code_doors.end_processes()
    print(*faults[:20], sep="\n", flush=True)
    total = sum(outcomes.values(), Counter())
    return {
        "processor": processor(),
        "minutes": minutes,
        "seed": seed,
        "inputs": total.total(),
        **{outcome: total[outcome] for outcome in ("right", "named", "tracebacks", "silent")},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "doors": {door: dict(counts) for door, counts in outcomes.items()},
        "faults": faults[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="benchmarks/doors.json")
    options = parser.parse_args()
    figures = fuzz(options.minutes, options.seed)
    Path(options.out).write_text(json.dumps(figures, indent=1, ensure_ascii=True) + "\n")
    print({name: figures[name] for name in ("inputs", "right", "named", "tracebacks", "silent", "peak_mib")})


if __name__ == "__main__":
    main()
