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
import math
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
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.hostile import (
    CODE,
    DEEDS,
    KINDS,
    MODES,
    SOUND,
    TEXTS,
    Draw,
    drawing,
    hostile_record,
    hostile_value,
    mutated,
    sound_records,
)
from benchmarks.machine import processor
from data_prep import cli
from data_prep.ingest.archive import Refused, members
from data_prep.ingest.images import inspect
from data_prep.sources.own import own
from data_prep.sources.source import BadRow, Candidate
from trainer.config import ConfigError, RewardFunction, Turns
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import question_text
from trainer.images.decoding import ImageLimits, decode_image
from trainer.rewards.completion_facts import facts_of, function_specs
from trainer.rewards.process_pool import ProcessPool
from trainer.sampling.api_server import decode_as_training
from trainer.turns.episode import ERROR, FAILED, Observation, Situation
from trainer.turns.messages import packed, unpacked
from trainer.turns.own import OwnEnvironment

DEADLINE_S = 1.0
"""Longest call of people's code."""


class Silent(Exception):
    """What went wrong without a word."""


def expect(sound: Any, what: object) -> None:
    """Raises Silent where something does not hold."""
    if not sound:
        raise Silent(str(what)[:600])


class named(contextlib.suppress):
    """What is refused with a reason, which is one line."""

    def __init__(self) -> None:
        super().__init__(ConfigError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        expect(not isinstance(error, ConfigError) or str(error).strip(), "no reason")
        return super().__exit__(kind, error, trace)


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


def picture(draw: Draw, folder: Path) -> str:
    """An encoded image whose bytes were changed: what the checks call sound, training decodes alike."""
    data = mutated(draw, drawing(draw, draw.choice(KINDS), draw.choice(MODES)))
    facts = inspect(data, ImageLimits())
    if facts.error:
        return "named"
    image = decode_image(data, "row")
    expect(
        image.mode == "RGB" and image.size == (facts.width, facts.height), f"{image.size}, and not {facts}"
    )
    return "right"


@cache
def serving_decoder() -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    decode_as_training()
    return ImageMediaIO()


def requested_picture(draw: Draw, folder: Path) -> str:
    """An image of a request to `serve`: shown as training shows it, or refused with status 400."""
    data = drawing(draw, draw.choice(KINDS), draw.choice(MODES))
    data = mutated(draw, data) if draw.random() < 0.7 else data
    text = base64.b64encode(data).decode() if draw.random() < 0.9 else draw.choice(TEXTS)
    try:
        shown = serving_decoder().load_base64("image/png", text).media
    except ValueError:
        return "named"
    expect(
        shown.tobytes() == decode_image(data, "row").tobytes(), "serving shows another image than training"
    )
    return "right"


def observation(draw: Draw, folder: Path) -> str:
    """What a tool shows: any text, and images of any size and mode."""
    sizes = (0, 1, 4, 30, 500)
    images = []
    for _ in range(draw.choice((0, 1, 2))):
        images.append(Image.new(draw.choice((*MODES, "YCbCr")), (draw.choice(sizes), draw.choice(sizes))))
    try:
        shown = Observation(hostile_value(draw, 1), images)
    except ValueError as error:
        packed({"failed": str(error)})
        return "named"
    about, again = unpacked(packed({"text": shown.text}, shown.images))
    about["text"].encode()
    expect([image.mode for image in again] == ["RGB"] * len(images), "images are lost on the way")
    return "right"


def message(draw: Draw, folder: Path) -> str:
    """What a process with a user's code sends, changed on the way."""
    with contextlib.suppress(ValueError):
        unpacked(mutated(draw, packed({"text": "x"}, [Image.new("RGB", (5, 4))])))
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
        records.append(record | ({"image": base64.b64encode(drawing(draw)).decode()} if i % 2 else {}))
    for _ in range(20):
        records.insert(draw.randrange(len(records) + 1), hostile_record(draw))
    path, out = folder / "d.jsonl", folder / "out"
    path.write_text("\n".join(map(json.dumps, records)))
    stated = io.StringIO()
    with contextlib.redirect_stdout(stated), contextlib.redirect_stderr(stated):
        code = cli.main(["prepare", str(path), "--out", str(out), "--validation", "0", "--workers", "1"])
    expect(code == 0, f"exit code {code}: {stated.getvalue()[-500:]}")
    known = read_manifest(out)
    kept = {question_text(row.messages).strip() for split in known.rows for row in Dataset(out, split)}
    lost = [record for record in sound if record["question"] not in kept]
    counts = sum(known.rows.values()) + sum(known.quarantined.values())
    expect(not lost and counts == len(records), f"lost {lost[:2]}, {counts} of {len(records)} counted")
    expect(
        all(file.parent == out for file in out.rglob("*") if file.is_file()), "a file outside of the folder"
    )
    return "named" if known.quarantined else "right"


@cache
def code_file() -> str:
    path = Path(tempfile.mkdtemp()) / "mine.py"
    path.write_text(CODE)
    return str(path)


def graders(path: str) -> ProcessPool:
    return ProcessPool(1, DEADLINE_S, function_specs([RewardFunction(path=f"{path}:reward")]))


def environment(path: str) -> OwnEnvironment:
    return OwnEnvironment(Turns(environment=f"{path}:Mine", tool_seconds=DEADLINE_S))


kept_graders, kept_environment = cache(graders), cache(environment)


def end_processes() -> None:
    """Ends the processes of people's code."""
    kept_graders(code_file()).close()
    kept_environment(code_file()).processes.close()
    kept_graders.cache_clear()
    kept_environment.cache_clear()


def deed(draw: Draw) -> str:
    """What a user's code does."""
    return repr(hostile_value(draw, 2)) if draw.random() < 0.3 else draw.choice(DEEDS)


def reward_function(draw: Draw, folder: Path) -> str:
    """A user's function returns, raises, prints or does anything; the next completion is graded right."""
    sound_text = f"={draw.randrange(99)}"
    outcomes = []
    for text in (deed(draw), sound_text):
        task = ["user", text, facts_of("", "number", "", {})]
        verdict, value, why, _ = kept_graders(code_file()).submit(task).result(timeout=60)
        sound = verdict in ("correct", "wrong") and math.isfinite(value) and not why
        expect(
            sound or (verdict in ("error", "timeout") and len(why.splitlines()) == 1), (text, verdict, why)
        )
        outcomes.append("right" if sound else "named")
    expect(value == float(sound_text[1:]), f"{sound_text} gave {value, why}")
    return outcomes[0]


def own_environment(draw: Draw, folder: Path) -> str:
    """A user's environment answers and scores with anything; the next reply is answered right."""
    text, sound_text = deed(draw), f"={draw.randrange(99)}"
    mine, situation = kept_environment(code_file()), Situation((), lambda reply: None)
    answer, score = mine.answer(situation, [text]), mine.score(situation, [text])
    expect(score is None or math.isfinite(score), f"{text} scored {score}")
    after = mine.answer(situation, [sound_text])
    right = after is not None and after.text == f"got {sound_text}"
    expect(right and mine.score(situation, [sound_text]) == float(sound_text[1:]), f"{after} after {text}")
    return "named" if answer and answer.text.encode().decode().startswith((FAILED, ERROR)) else "right"


def code(draw: Draw, folder: Path) -> str:
    """A user's file whose bytes were changed is loaded or refused in one line."""
    path = folder / "mine.py"
    path.write_bytes(mutated(draw, CODE.encode()))
    try:
        if draw.random() < 0.5:
            environment(str(path)).processes.close()
        else:
            with contextlib.closing(graders(str(path))) as pool:
                pool.check()
    except ConfigError as error:
        expect(len(str(error).splitlines()) == 1, f"a reason of several lines: {error}")
        return "named"
    return "right"


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
    "pictures of requests": requested_picture,
    "reward functions": reward_function,
    "environments": own_environment,
    "files of code": code,
}
ROUND = {prepared: 1, reward_function: 8, own_environment: 8, code: 2}
"""Inputs of a door in one turn, where they take longer than milliseconds."""


def fuzz(minutes: float, seed: int) -> dict[str, Any]:
    """Runs all doors in turns."""
    outcomes: dict[str, Counter[str]] = {door: Counter() for door in DOORS}
    faults: list[str] = []
    end = time.monotonic() + 60 * minutes
    turn = 0
    while time.monotonic() < end:
        turn += 1
        for door, number in [
            (door, n) for door, through in DOORS.items() for n in range(ROUND.get(through, 40))
        ]:
            folder = Path(tempfile.mkdtemp())
            try:
                outcomes[door][DOORS[door](random.Random(f"{seed}/{door}/{turn}/{number}"), folder)] += 1
            except Exception as error:
                outcomes[door]["silent" if isinstance(error, Silent) else "traceback"] += 1
                faults.append(f"{seed}/{door}/{turn}/{number}: {traceback.format_exc(limit=-4)}"[:1500])
            shutil.rmtree(folder)
    end_processes()
    print(*faults[:20], sep="\n", flush=True)
    total = sum(outcomes.values(), Counter())
    return {
        "processor": processor(),
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
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="benchmarks/doors.json")
    options = parser.parse_args()
    figures = fuzz(options.minutes, options.seed)
    Path(options.out).write_text(json.dumps(figures, indent=1, ensure_ascii=True) + "\n")
    print({name: figures[name] for name in ("inputs", "right", "named", "tracebacks", "silent", "peak_mib")})


if __name__ == "__main__":
    main()
