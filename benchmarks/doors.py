"""Hostile rows, files, archives, pictures and messages through the doors by which people's data comes in.

    python -m benchmarks.doors [--minutes 30] [--out benchmarks/doors.json]

Each input gives the right thing or a named reason: `right` or `named` is counted. An exception that is no
reason is a traceback; a sound row that is lost, a row that is neither kept nor named, or an image that checks
call sound and training cannot decode is silent. tests/data_prep/test_doors.py holds the same for seconds.
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
import string
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
from PIL import Image

from benchmarks.machine import processor
from data_prep import cli
from data_prep.ingest.archive import Refused, members
from data_prep.ingest.images import inspect
from data_prep.sources.own import own
from data_prep.sources.source import BadRow, Candidate
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text
from trainer.images.decoding import ImageLimits, decode_image
from trainer.turns.episode import Observation
from trainer.turns.messages import packed, unpacked

Draw = random.Random
SOUND = 12
"""Sound rows beside hostile ones."""
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


class Silent(Exception):
    """What went wrong without a word."""


def drawing(draw: Draw, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A small image that no other one resembles."""
    image = Image.frombytes("RGB", (8, 6), draw.randbytes(144)).resize((64, 48), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, kind)
    return buffer.getvalue()


def mutated(draw: Draw, data: bytes) -> bytes:
    """Bytes with a few changes: flipped, cut, repeated, put in, moved."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        start = draw.randrange(len(changed) + 1)
        stop = min(len(changed), start + draw.choice((1, 1, 2, 8, 100)))
        match draw.randrange(6):
            case 0 if start < len(changed):
                changed[start] ^= 1 << draw.randrange(8)
            case 1:
                del changed[start:stop]
            case 2:
                changed[start:start] = draw.randbytes(stop - start)
            case 3:
                changed[start:start] = changed[start:stop] * draw.choice((1, 3, 50))
            case 4:
                changed[start:stop] = draw.choice(
                    (b"\0", b"\xff", b"\xff\xff\xff\xff", b'"', b"\n", b"9" * 9)
                )
            case _ if draw.random() < 0.2:
                del changed[start:]
    return bytes(changed)


# --- Values that stand where others are expected ---

TEXTS = (
    *("", " ", "\0", "\ud83d", "half \ud83d of it", "\udcff", "﻿", "\u2028", "\r\n", "a" * 5000),
    *("🙂" * 300, "../../up", "/etc/passwd", "/dev/zero", "/proc/kmsg", "~", "s3://b/x.png"),
    *("http://a.b/c.png", "file:///x.png", "data:,", "data:image/png;base64,!!!"),
    *("iVBORw0KGgo" + "A" * 100, "AAAA" * 400, "b'\\x89PNG'", "{'bytes': b'', 'path': 1}", "<image>"),
    *("<image 2>", "<IMAGE><img>", "<image 999>", "<img>x.png</img>", "<img src='x'>", "[IMG]"),
    *("<video>", "<audio>", "<|image_pad|>", "<|im_end|>", "\\boxed{1}", "\\boxed{" * 50, "#### 5"),
    *("$$", "nan", "1e999", "½", "²", "[" * 3000, '{"a":' * 500, "[[[", "['a', \"b\"]", "{}", "[]"),
    *("null", "true", "-0", "0x10", "1,000", "A) x B) y"),
)  # fmt: skip
COLUMNS = (
    *("question", "answer", "image", "images", "choices", "solution", "system", "source", "split"),
    *("messages", "prompt", "conversations", "message", "reward_model", "image_1", "image_2"),
    *("video", "audio", "pass_rate", "metadata", "problem", "label", "options", "extra_info", "path"),
    *("id", "\ud83d", ""),
)  # fmt: skip


def hostile_value(draw: Draw, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = draw.randrange(12 if depth else 8)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        letters = string.printable + "äß你\ud83d\ude42\u202e\0"
        return "".join(draw.choices(letters, k=draw.choice((1, 5, 40, 400))))
    if kind == 5:
        return draw.choice((0, -1, 10**30, 1.5, float("nan"), float("inf"), 1e-320, True, False, None))
    if kind == 6:
        return base64.b64encode(mutated(draw, drawing(draw, draw.choice(KINDS)))).decode()
    if kind == 7:
        return {"bytes": draw.choice(TEXTS), "path": draw.choice((None, *TEXTS))}
    if kind < 10:
        return [hostile_value(draw, depth - 1) for _ in range(draw.choice((0, 1, 2, 30)))]
    if kind == 10:
        roles = ("user", "assistant", "system", "tool", "human", "gpt", None, 3)
        names = draw.choice((("role", "content"), ("from", "value")))
        turns = []
        for _ in range(draw.choice((1, 2, 3))):
            turns.append(dict(zip(names, (draw.choice(roles), hostile_value(draw, depth - 1)), strict=True)))
        return turns
    keys = draw.choices(
        ("type", "text", "image", "image_url", "url", "bytes", "path", "A", "label", "\ud83d"), k=3
    )
    return {key: hostile_value(draw, depth - 1) for key in keys}


def sound_records(draw: Draw, count: int = SOUND) -> list[dict[str, Any]]:
    """Records that must come out as they are."""
    number = draw.randrange(10**9)
    return [
        {"question": f"Sound {number}: {i} + {i}, plus 1?", "answer": str(2 * i + 1)} for i in range(count)
    ]


def hostile_record(draw: Draw) -> dict[str, Any]:
    record: dict[str, Any] = {"question": f"Hostile {draw.random()}?", "answer": "5"}
    for _ in range(draw.choice((1, 1, 2, 4))):
        record[draw.choice(COLUMNS)] = hostile_value(draw)
    for name in list(record):
        if draw.random() < 0.1:
            del record[name]
    return record


# --- Doors ---


def read_rows(path: Path) -> list[Candidate | BadRow]:
    """All rows of a file, twice alike, and every reason can be written."""
    rows: list[Candidate | BadRow] = []
    for source in own(path):
        first, again = list(source.rows()), list(source.rows())
        if str(first) != str(again):
            raise Silent("two readings differ")
        rows += first
    for row in rows:
        if isinstance(row, BadRow):
            json.dumps([row.reason, row.detail, row.raw]).encode()
        else:
            json.dumps([row.messages, row.answer, row.solution, row.images], ensure_ascii=False).encode()
    return rows


def expect_sound(rows: list[Candidate | BadRow], records: list[dict[str, Any]], total: int) -> str:
    """Whether all sound records are among the rows, and every record is one row."""
    kept = Counter()
    for row in rows:
        if isinstance(row, Candidate):
            kept[question_text(row.messages), row.answer] += 1
    for record in records:
        if not kept[record["question"], record["answer"]]:
            raise Silent(f"a sound row is lost: {record}")
    if len(rows) != total:
        raise Silent(f"{len(rows)} rows of {total} records")
    return "named" if any(isinstance(row, BadRow) for row in rows) else "right"


def json_lines(draw: Draw, folder: Path) -> str:
    """Records of any values, and lines of any bytes, between sound ones."""
    sound = sound_records(draw)
    lines = [json.dumps(record).encode() for record in sound]
    count = draw.choice((1, 1, 2))
    for _ in range(count):
        line = json.dumps(hostile_record(draw)).encode()
        if draw.random() < 0.3:
            line = mutated(draw, line)
        line = line.replace(b"\n", b" ").replace(b"\r", b" ")
        if not line.strip():
            line = b"{}"
        lines.insert(draw.randrange(len(lines) + 1), line)
    path = folder / "d.jsonl"
    path.write_bytes(b"\n".join(lines))
    return expect_sound(read_rows(path), sound, SOUND + count)


def table(draw: Draw, folder: Path) -> str:
    """A line of any characters between sound ones, some of them with quotes and line breaks."""
    ending, between = draw.choice((("csv", ","), ("tsv", "\t"), ("csv", ";")))
    sound = sound_records(draw)
    lines = [f"question{between}answer"]
    for i, record in enumerate(sound):
        if between in record["question"] or i % 2:
            record["question"] = record["question"].replace("plus", 'he said "plus"')
            lines.append('"{}"{}{}'.format(record["question"].replace('"', '""'), between, record["answer"]))
        else:
            lines.append(f"{record['question']}{between}{record['answer']}")
    line = list(f"A hostile line{between}7")
    for _ in range(draw.choice((1, 2, 4))):
        line.insert(
            draw.randrange(len(line) + 1), draw.choice(('"', "'", between, "\\", '""', "\0", "é", "\\n", "x"))
        )
    lines.insert(draw.randrange(1, len(lines) + 1), "".join(line))
    path = folder / f"d.{ending}"
    path.write_text("\n".join(lines))
    return expect_sound(read_rows(path), sound, SOUND + 1)


def parquet(draw: Draw, folder: Path) -> str:
    """A row with bytes that are no text, or no image, between sound ones."""
    sound = sound_records(draw)
    records: list[dict[str, Any]] = []
    for record in sound:
        records.append({name: text.encode() for name, text in record.items()} | {"image": None})
    path_text = draw.choice(TEXTS).encode(errors="replace")
    hostile = {
        "question": mutated(draw, b"What is it, then?"),
        "answer": mutated(draw, b"12"),
        "image": {"bytes": draw.choice((None, mutated(draw, drawing(draw)))), "path": path_text},
    }
    records.insert(draw.randrange(len(records) + 1), hostile)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.binary())])
    kinds = {"question": pa.binary(), "answer": pa.binary(), "image": image}
    columns = []
    for name, kind in kinds.items():
        column = pa.array([record[name] for record in records], kind)
        columns.append(column if name == "image" else column.view(pa.string()))
    path = folder / "d.parquet"
    pq.write_table(pa.table(columns, names=list(kinds)), path)
    return expect_sound(read_rows(path), sound, SOUND + 1)


def whole_file(draw: Draw, folder: Path) -> str:
    """A data file of any kind whose bytes were changed anywhere."""
    records = [*sound_records(draw), hostile_record(draw)]
    path = folder / ("d" + draw.choice((".jsonl", ".json", ".csv", ".tsv", ".parquet")))
    pairs = []
    for record in records:
        pairs.append(
            [str(record.get(name)).encode(errors="replace").decode() for name in ("question", "answer")]
        )
    match path.suffix:
        case ".parquet":
            pq.write_table(
                pa.table({"question": [q for q, _ in pairs], "answer": [a for _, a in pairs]}), path
            )
            data = path.read_bytes()
        case ".csv" | ".tsv":
            data = b"question,answer\n" + "\n".join(map(",".join, pairs)).encode()
        case ".json":
            data = json.dumps(records).encode()
        case _:
            data = "\n".join(map(json.dumps, records)).encode()
    encoding = draw.choice(("utf-8", "utf-8", "utf-16", "latin-1", "utf-32", "gb18030"))
    if encoding != "utf-8" and path.suffix != ".parquet":
        data = data.decode(errors="replace").encode(encoding, "replace")
    path.write_bytes(mutated(draw, data))
    with named():
        read_rows(path)
        return "right"
    return "named"


def archive(draw: Draw, folder: Path) -> str:
    """An archive whose bytes or names were changed."""
    path = folder / draw.choice(("a.zip", "a.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz"))
    names = [
        "a/1.png",
        draw.choice(("../up.png", "/abs.png", "x" * 300, "b\\c", "n\0", "ä.png", "a/" * 3000, ".")),
    ]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as written:
            for name in names:
                written.writestr(name, drawing(draw))
    else:
        mode = {".tar": "w", ".gz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}[path.suffix]
        with tarfile.open(path, mode) as packed_files:
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
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise Silent(f"a member named {member.name}")
            if not member.link and len(member.read()) != member.size:
                raise Silent("a member that is shorter than it says")
        return "right"
    return "named"


def picture(draw: Draw, folder: Path) -> str:
    """An encoded image whose bytes were changed: what the checks call sound, training decodes alike."""
    kind = draw.choice(KINDS)
    mode = draw.choice(("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F"))
    try:
        data = drawing(draw, kind, mode)
    except (OSError, ValueError, KeyError):
        data = drawing(draw, kind)
    data = mutated(draw, data)
    facts = inspect(data, ImageLimits())
    if facts.error:
        return "named"
    image = decode_image(data, "row")
    if image.mode != "RGB" or image.size != (facts.width, facts.height):
        raise Silent(f"{image.mode} {image.size}, and the checks say {facts.width}x{facts.height}")
    return "right"


def observation(draw: Draw, folder: Path) -> str:
    """What a tool shows: any text, and images of any size and mode."""
    images = []
    for _ in range(draw.choice((0, 1, 2))):
        size = draw.choice((0, 1, 4, 30, 500)), draw.choice((0, 1, 4, 30, 500))
        mode = draw.choice(("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "I", "F", "YCbCr"))
        images.append(Image.new(mode, size))
    text = hostile_value(draw, 1)
    try:
        shown = Observation(text, images)
    except ValueError as error:
        packed({"failed": str(error)})
        return "named"
    about, again = unpacked(packed({"text": shown.text}, shown.images))
    about["text"].encode()
    if len(again) != len(images) or any(image.mode != "RGB" for image in again):
        raise Silent("images are lost on the way")
    return "right"


def message(draw: Draw, folder: Path) -> str:
    """What a process with a user's code sends, changed on the way."""
    data = mutated(draw, packed({"text": "x"}, [Image.new("RGB", (5, 4))]))
    try:
        unpacked(data)
    except ValueError:
        return "named"
    return "right"


def manifest(draw: Draw, folder: Path) -> str:
    """The manifest of a bucket."""
    file = {
        "path": "train-00000-of-00001.parquet",
        "split": "train",
        "rows": 5,
        "bytes": 9,
        "sha256": "a" * 64,
    }
    values = {
        "name": "d",
        "revision": "",
        "rows": {"train": 5},
        "files": [file],
        "fingerprint": "a" * 64,
        "format": 2,
    }
    values |= {"images_per_row": {"train": 1}, "quarantined": {}, "settings": {}, "statistics": {}}
    if draw.random() < 0.5:
        values[draw.choice(list(values))] = hostile_value(draw)
    elif draw.random() < 0.5:
        file[draw.choice(list(file))] = hostile_value(draw)
    data = json.dumps(values).encode()
    (folder / "manifest.json").write_bytes(mutated(draw, data) if draw.random() < 0.3 else data)
    with named():
        read = read_manifest(folder)
        for name in (*read.rows, *(one["path"] for one in read.files)):
            if "/" in name or name.startswith("."):
                raise Silent(f"a name that leads out of the folder: {name}")
        with contextlib.suppress(ConfigError):
            Dataset(folder)
        return "right"
    return "named"


def prepared(draw: Draw, folder: Path) -> str:
    """A whole preparation: hostile rows with images between sound ones, through the command line."""
    sound = sound_records(draw, 40)
    records = [dict(record) for record in sound]
    for i, record in enumerate(records):
        if i % 2:
            record["image"] = base64.b64encode(drawing(draw)).decode()
    count = 20
    for _ in range(count):
        records.insert(draw.randrange(len(records) + 1), hostile_record(draw))
    path, out = folder / "d.jsonl", folder / "out"
    path.write_text("\n".join(map(json.dumps, records)))
    stated = io.StringIO()
    with contextlib.redirect_stdout(stated), contextlib.redirect_stderr(stated):
        code = cli.main(["prepare", str(path), "--out", str(out), "--validation", "0", "--workers", "1"])
    if code:
        raise Silent(f"exit code {code}: {stated.getvalue()[-500:]}")
    known = read_manifest(out)
    kept = set()
    for split in known.rows:
        kept |= {question_text(row.messages).strip() for row in Dataset(out, split)}
    lost = [record for record in sound if record["question"] not in kept]
    if lost or sum(known.rows.values()) + sum(known.quarantined.values()) != len(records):
        raise Silent(f"lost {lost[:2]}, {known.rows} kept, {known.quarantined} left out of {len(records)}")
    if any(file.parent != out for file in out.rglob("*") if file.is_file()):
        raise Silent("a file outside of the folder")
    return "named" if known.quarantined else "right"


class named(contextlib.suppress):
    """What is refused with a reason."""

    def __init__(self) -> None:
        super().__init__(ConfigError)


DOORS: dict[str, Callable[[Draw, Path], str]] = {
    "JSON lines": json_lines,
    "tables": table,
    "Parquet rows": parquet,
    "data files": whole_file,
    "archives": archive,
    "pictures": picture,
    "observations of tools": observation,
    "messages of tools": message,
    "manifests": manifest,
    "whole preparations, 20 hostile rows each": prepared,
}


def fuzz(minutes: float, seed: int) -> dict[str, Any]:
    """Runs all doors in turns; a whole preparation takes as long as hundreds of other inputs."""
    outcomes: dict[str, Counter[str]] = {door: Counter() for door in DOORS}
    faults: list[str] = []
    end = time.monotonic() + 60 * minutes
    turn = 0
    folder = Path(tempfile.mkdtemp())
    while time.monotonic() < end:
        turn += 1
        for door, through in DOORS.items():
            for number in range(1 if through is prepared else 40):
                draw = random.Random(f"{seed}/{door}/{turn}/{number}")
                try:
                    outcomes[door][through(draw, folder)] += 1
                except Silent as error:
                    outcomes[door]["silent"] += 1
                    faults.append(f"{seed}/{door}/{turn}/{number}: silent: {error}"[:600])
                except Exception:
                    outcomes[door]["traceback"] += 1
                    faults.append(f"{seed}/{door}/{turn}/{number}: {traceback.format_exc(limit=-4)}"[:1500])
                shutil.rmtree(folder)
                folder.mkdir()
    for fault in faults[:20]:
        print(fault, flush=True)
    total = sum(outcomes.values(), Counter())
    return {
        "minutes": minutes,
        "seed": seed,
        "inputs": total.total(),
        "right": total["right"],
        "named": total["named"],
        "tracebacks": total["traceback"],
        "silent": total["silent"],
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "doors": {door: dict(counts) for door, counts in outcomes.items()},
        "faults": faults[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="benchmarks/doors.json")
    options = parser.parse_args()
    found = {"processor": processor(), **fuzz(options.minutes, options.seed)}
    Path(options.out).write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n")
    print(
        json.dumps(
            {key: found[key] for key in ("inputs", "right", "named", "tracebacks", "silent", "peak_mib")}
        )
    )


if __name__ == "__main__":
    main()
