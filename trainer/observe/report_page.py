"""The page of a report and its tables: machines, rollout workers, samples."""

from __future__ import annotations

import base64
import html
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainer.config.run_folder import SAMPLE_IMAGES, SAMPLES, read_lines
from trainer.observe.charts import format_number
from trainer.observe.history import SLOWED, column
from trainer.system.contained_path import inside


def html_page(title: str, body: str) -> str:
    """A page that loads nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{_asset('report.css')}</style></head><body><main>{body}</main>"
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def readable(file: str, section: Callable[[], str]) -> str:
    """A section made from one file of the run, or the sentence that the file is none of a run's: it may be a
    stranger's, and costs no other section."""
    try:
        return section()
    except Exception as error:
        return f'<p class="absent">{file} is not what a run writes ({type(error).__name__}): left out.</p>'


class Markup(str):
    """A cell that is HTML already."""


def table_cells(texts: Iterable[str], tag: str = "td") -> str:
    """The cells of a table's row."""
    cells = (text if isinstance(text, Markup) else html.escape(text) for text in texts)
    return "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table with a head. kind: its class in the style sheet."""
    head = table_cells(columns, "th")
    body = "".join(f"<tr>{table_cells(row)}</tr>" for row in rows)
    return f"<table{kind and f' class={kind}'}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def color_key(name: str, color: int) -> Markup:
    """A name beside the color that stands for it."""
    return Markup(f'<span class="key s{color}"><i></i>{html.escape(name)}</span>')


# --- machines -------------------------------------------------------------------------------------------

Combine = Callable[[list[float]], float]
OF_GPUS: tuple[tuple[str, str, Combine, str, float], ...] = (
    ("GPUs busy", "busy_fraction", statistics.mean, "{:.0%}", 1),
    ("GPU memory, peak", "memory_bytes", max, "{:.1f} GiB", 2**30),
    ("hottest", "temperature_c", max, "{} °C", 0),
    ("power", "power_w", statistics.mean, "{:.0f} W", 1),
)
OF_NODES: tuple[tuple[str, str, Combine, str, float], ...] = (
    ("CPU", "cpu_fraction", statistics.mean, "{:.0%}", 1),
    ("memory, peak", "memory_fraction", max, "{:.0%}", 1),
    ("disk free, least", "disk_free_bytes", min, "{:.0f} GiB", 2**30),
    ("network in", "network_in", statistics.mean, "{:,.0f} MB/s", 1e6),
    ("out", "network_out", statistics.mean, "{:,.0f} MB/s", 1e6),
    ("InfiniBand in", "infiniband_in", statistics.mean, "{:,.0f} MB/s", 1e6),
    ("out", "infiniband_out", statistics.mean, "{:,.0f} MB/s", 1e6),
)
"""(title, field of a sample, of all samples, format, unit; 0: as it was sampled)."""


def nodes_section(samples: Sequence[dict[str, Any]]) -> str:
    """A table of the nodes; "" without samples."""
    by_node: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_node.setdefault(sample["node"], []).append(sample | sample.get("bytes_per_s", {}))
    rows = []
    for node, of_node in sorted(by_node.items()):
        gpus = list(chain.from_iterable(column(of_node, "gpus")))
        slowed = sum(bool(gpu.get("slowdown", 0) & SLOWED) for gpu in gpus)
        slow = f"{slowed / len(gpus):.0%} of samples" if slowed else "never"
        rows.append([str(node), *_row(OF_GPUS, gpus), slow if gpus else "–", *_row(OF_NODES, of_node)])
    titles = ["node", *map(itemgetter(0), OF_GPUS), "slowed down", *map(itemgetter(0), OF_NODES)]
    table = html_table(titles, rows, "wide")
    return f'<h2>Machines</h2><section class="phases">{table}</section>' if rows else ""


def _row(
    columns: Sequence[tuple[str, str, Combine, str, float]], samples: Sequence[dict[str, Any]]
) -> list[str]:
    cells = []
    for _, name, combine, form, unit in columns:
        values = column(samples, name)
        whole = combine(values) if values else 0
        cells.append(form.format(whole / unit if unit else whole) if values else "–")
    return cells


# --- rollout workers ------------------------------------------------------------------------------------

MAX_ENDED = 12
"""Workers that have ended of which the page says why, the newest ones."""


def workers_section(workers: Sequence[dict[str, Any]]) -> str:
    """Tables of GPUs and of ends; "" without workers."""
    if not workers:
        return ""
    total = sum(column(workers, "completions"))
    rows = []
    for device in dict.fromkeys(worker["device"] for worker in workers):
        alike = [worker for worker in workers if worker["device"] == device]
        sampled = sum(column(alike, "completions"))
        alive = sum(worker["lives"] for worker in alike)
        share = f"{sampled / total:.0%}" if total else "–"
        rows.append([device, f"{alive} of {len(alike)}", f"{sampled:,}", share])
    shown = html_table(["GPU", "alive at the end", "completions since the last start", "share"], rows, "wide")
    ended = [worker for worker in workers if not worker["lives"]]
    if ended:
        whys = [[worker["worker"], worker["why"]] for worker in ended[-MAX_ENDED:]]
        shown += html_table(["worker", "why it ended"], whys, "wide")
    return f'<h2>Rollout workers</h2><section class="phases">{shown}</section>'


# --- samples --------------------------------------------------------------------------------------------

MAX_SAMPLES = 24
MAX_PICTURE_BYTES = 6_000_000
"""Bytes of all images in the page; those beyond it are named, not shown."""
IMAGE_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""First bytes of the images that a run keeps."""


def choose_samples(samples: Sequence[dict[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """At most `limit` samples, by whole steps: the first and the last ones, and evenly between; newest step
    first."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        steps.setdefault(sample["step"], []).append(sample)
    order = sorted(steps)
    while len(order) > 1 and sum(min(len(steps[step]), limit) for step in order) > limit:
        count = max(len(order) * limit // sum(len(steps[step]) for step in order), 1)
        count = min(count, len(order) - 1)
        last = len(order) - 1
        order = [order[round(i * last / (count - 1))] for i in range(count)] if count > 1 else order[-1:]
    chosen = []
    for step in reversed(order):
        chosen += steps[step][:limit]
    return chosen


def samples_section(run_dir: Path) -> str:
    """Cards of some of the run's samples; "" without samples."""
    samples = []
    for line in read_lines(run_dir / SAMPLES):
        images = line.get("images", [])
        if type(line.get("step")) is int and isinstance(images, list):  # else no run wrote it
            samples.append(line | {"verdict": html.escape(str(line.get("verdict", ""))), "images": images})
    if not samples:
        return ""
    chosen = choose_samples(samples)
    of = f" of {len(samples):,}" if len(chosen) < len(samples) else ""
    buttons = ""
    for verdict in sorted({sample["verdict"] for sample in chosen}):
        buttons += f'<button data-verdict="{verdict}">{verdict.replace("_", " ")}</button>'
    budget = MAX_PICTURE_BYTES
    rows = []
    step = None
    for sample in chosen:
        if sample["step"] != step:
            step = sample["step"]
            rows.append(f'<h3 class="step">step {step:,}</h3>')
        pictures, budget = _pictures(run_dir / SAMPLE_IMAGES, sample["images"], budget)
        rows.append(readable(SAMPLES, lambda sample=sample, pictures=pictures: _card(sample, pictures)))
    return (
        f"<h2>Samples <small>{len(chosen)}{of} written</small></h2>"
        f'<div class="filter"><button data-verdict="" class="on">all</button>'
        f'{buttons}</div><section class="samples">{"".join(rows)}</section>'
    )


DECIDED_BY = {"exact": "exact arithmetic", "points": "values at points", "text": "its text"}
"""How a card says what decided (docs/rewards.md)."""


def _card(sample: dict[str, Any], pictures: Sequence[str]) -> str:
    verdict = sample["verdict"]
    in_question = len(pictures) - sum(sample.get("shown", []))
    numbers = [f"reward {format_number(float(sample['reward']))}"] if "reward" in sample else []
    if "advantage" in sample:
        numbers.append(f"advantage {float(sample['advantage']):+.2f}")
    if "tokens" in sample:
        numbers.append(f"{sample['tokens']} tokens")
    rule = DECIDED_BY.get(str(sample.get("rule", "")))
    if rule:
        numbers.append(f"decided by {rule}")
    numbers.append(f"row {sample.get('row', '?')}")
    return (
        f'<article data-verdict="{verdict}"><div class="pictures">{"".join(pictures[:in_question])}</div>'
        f'<div class="said"><p class="question">{html.escape(str(sample.get("question", "")))}</p>'
        f"{_replies(sample, pictures[in_question:])}"
        f'<p class="grade"><span class="chip {verdict}">{verdict.replace("_", " ")}</span>'
        f"<span>ground truth <b>{html.escape(str(sample.get('ground_truth', '')))}</b></span>"
        f"<small>{html.escape(' · '.join(numbers))}</small></p></div></article>"
    )


def _replies(sample: dict[str, Any], pictures: Sequence[str]) -> str:
    """The completion; of an episode, each reply and what was observed then, with the images that it
    showed."""
    left = list(pictures)
    counts = iter(sample.get("shown", ()))
    turns = ""
    for turn, text in enumerate(sample.get("dialog") or [str(sample.get("completion", ""))]):
        if turn % 2 == 0:
            turns += f'<div class="answer">{_answer(text)}</div>'
            continue
        count = next(counts, 0)
        images, left = left[:count], left[count:]
        turns += f'<div class="observed"><p>{html.escape(text)}</p>{"".join(images)}</div>'
    return turns


def _answer(text: str, limit: int = 4000) -> str:
    """The completion with its think block dimmed and its answer block strong; the middle of a long one is
    left out."""
    if len(text) > limit:
        left_out = f"\n[… {len(text) - limit:,} characters left out …]\n"
        text = text[: limit // 2] + left_out + text[-limit // 2 :]
    safe = html.escape(text)
    safe = re.sub(r"(?s)(&lt;think&gt;.*?(?:&lt;/think&gt;|$))", r'<span class="think">\1</span>', safe)
    return re.sub(r"(?s)(&lt;answer&gt;.*?&lt;/answer&gt;)", r"<b>\1</b>", safe)


def _pictures(folder: Path, names: Sequence[Any], budget: int) -> tuple[list[str], int]:
    """Each image in the page, or its name where it is no image of the run's own or the budget of bytes is
    spent; and what is left of it. folder: that of the run's sample images. The page is made to be handed on:
    no other file of this machine may come into it."""
    parts = []
    for name in names:
        file = inside(folder, str(name).removeprefix(f"{SAMPLE_IMAGES}/"))
        size = file.stat().st_size if file is not None and file.is_file() else 0
        data = file.read_bytes() if file is not None and 0 < size <= budget else b""
        kinds = [kind for first_bytes, kind in IMAGE_KINDS.items() if data.startswith(first_bytes)]
        if not kinds:
            parts.append(f'<span class="absent">{html.escape(str(name))}</span>')
            continue
        budget -= size
        parts.append(f'<img alt="" src="data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}">')
    return parts, budget
