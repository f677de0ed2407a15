"""One self-contained HTML page about a prepared dataset: sample rows with their images, and tables."""

from __future__ import annotations

import base64
import html
import io
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.write.statistics import tables
from trainer.data.schema import Manifest, Row, question_text
from trainer.images.decoding import open_image, to_rgb
from trainer.rewards.grading.kinds import in_words, reading

SAMPLES_PER_SPLIT = 24
THREADS = 4
THUMBNAIL = 280
"""Longest side of an image on the page, in pixels."""
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1c2430; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.tables { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
td { padding: .15rem .6rem .15rem 0; border-bottom: 1px solid #e4e8ee; vertical-align: top; }
td.n { text-align: right; }
td.b { width: 8rem; } td.b div { background: #4a7bd0; height: .7rem; border-radius: 2px; }
.rows { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }
.row { border: 1px solid #dde3ea; border-radius: 8px; padding: .8rem; overflow-wrap: anywhere; }
.row img { max-width: 100%; background: #fff; border: 1px solid #eef1f5; }
.row p { margin: .5rem 0; white-space: pre-wrap; max-height: 14rem; overflow: auto; }
.meta { color: #66707d; font-size: .82rem; }
.reference { background: #e7f5ea; border-radius: 4px; padding: .1rem .4rem; }
"""


class Samples:
    """Evenly spaced rows of every split, drawn in threads, since Pillow releases the interpreter's lock."""

    def __init__(self, rows: dict[str, int]) -> None:
        """`rows` is the number of rows of each split."""
        self._rows = rows
        self._chosen: dict[str, range] = {}
        for split, count in rows.items():
            every = max(1, count // SAMPLES_PER_SPLIT)
            self._chosen[split] = range(0, count, every)[:SAMPLES_PER_SPLIT]
        self._drawn: dict[str, list[Future[str]]] = {split: [] for split in rows}
        self._threads = ThreadPoolExecutor(THREADS)

    def offer(self, split: str, number: int, row: Row) -> None:
        """Draws a row of a split if it is one of the samples. Rows must be offered in their order."""
        if number in self._chosen[split]:
            self._drawn[split].append(self._threads.submit(_row, row))

    def sections(self) -> list[str]:
        sections = []
        for split, drawn in self._drawn.items():
            rows = [future.result() for future in drawn]
            sections.append(
                f"<h2>{_text(split)}: {len(rows)} of {self._rows[split]:,} rows, evenly spaced</h2>"
            )
            sections.append(f"<div class=rows>{''.join(rows)}</div>")
        self._threads.shutdown()
        return sections


def write_preview(out: Path, manifest: Manifest, samples: Samples) -> None:
    """Writes `preview.html` into a dataset's folder, before the manifest."""
    sections = [f"<h1>{_text(manifest.name)}</h1>", _facts(manifest), _tables(manifest), *samples.sections()]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_text(manifest.name)}</title><style>{STYLE}</style>{''.join(sections)}</html>"
    )
    (out / "preview.html").write_text(page, encoding="utf-8")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _facts(manifest: Manifest) -> str:
    shards = f"{len(manifest.files)} shards, {manifest.size_bytes / 2**20:,.1f} MiB"
    pin = _text(manifest.revision or "local")
    return f"<p class=meta>{shards}. Revision: {pin}.<br>Fingerprint: {_text(manifest.fingerprint)}</p>"


def _tables(manifest: Manifest) -> str:
    shown = "".join(_table(title, counts) for title, counts in tables(manifest))
    return f"<div class=tables>{shown}</div>"


def _table(title: str, counts: dict[str, int]) -> str:
    largest = max([*counts.values(), 1])
    rows = ""
    for key, value in counts.items():
        rows += (
            f"<tr><td>{_text(key)}</td><td class=n>{value:,}</td>"
            f"<td class=b><div style='width:{100 * value / largest:.0f}%'></div></td></tr>"
        )
    return f"<table><caption>{_text(title)}</caption>{rows}</table>"


def _row(row: Row) -> str:
    images = ""
    for image in row.images:
        images += f"<img src='{thumbnail(image)}' alt='image'>"
    solution = ""
    if row.solution:
        solution = f"<details><summary>solution</summary><p>{_text(row.solution)}</p></details>"
    system = next((m["content"] for m in row.messages if m["role"] == "system"), "")
    system = system if isinstance(system, str) else json.dumps(system)
    question = question_text(row.messages)
    read_as = in_words(row.reading or reading(row.answer, question))
    about = " · ".join(map(_text, filter(None, (row.answer_type, read_as, row.source, row.id))))
    return (
        f"<div class=row>{images}<p>{_text(question_text(row.messages))}</p>"
        f"<span class=reference>{_text(row.answer)}</span> <span class=meta>{about}</span>{solution}"
        f"<details class=meta><summary>system prompt</summary><p>{_text(system)}</p></details></div>"
    )


def thumbnail(data: bytes) -> str:
    """A small JPEG of an image as a data URI."""
    with open_image(data) as image:
        image.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))
        small = to_rgb(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
