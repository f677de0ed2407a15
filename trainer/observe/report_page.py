"""The page of a report and its tables: machines, rollout workers, samples."""

from __future__ import annotations

import base64
import html
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.config.run_folder import SAMPLE_IMAGES, SAMPLES, read_lines
from trainer.observe.charts import format_number
from trainer.observe.history import SLOWED, STRAGGLES, column
from trainer.system.contained_path import inside

PULLED = "pulled"
"""Folder of a run's record on the desk that its files are fetched into (recipes/drivers/fetched_runs.py)."""


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


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def run_name(folder: Path) -> str:
    """A run's id: that of its folder, or of the folder that it was pulled into."""
    return folder.absolute().parent.name if folder.name == PULLED else folder.absolute().name


def read_cost(folder: Path) -> dict[str, Any]:
    """`cost.json`, which the desk writes: usd, hours; planned_usd and planned_hours where there is a plan."""
    try:
        cost = json.loads((folder / "cost.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(cost, dict):
        return {}
    return {name: value for name, value in cost.items() if isinstance(value, int | float)}


def format_cost(folder: Path) -> str:
    """Dollars so far against those planned."""
    known = read_cost(folder)
    if not known.get("usd") and not known.get("planned_usd"):
        return "–"
    planned = f" of {known['planned_usd']:,.2f} planned" if known.get("planned_usd") else ""
    return f"${known['usd']:,.2f}{planned}"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table with a head. kind: its class in the style sheet."""
    head = table_cells(columns, "th")
    body = "".join(f"<tr>{table_cells(row)}</tr>" for row in rows)
    return f"<table{kind and f' class={kind}'}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def wide_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return html_table(columns, rows, "wide")


def color_key(name: str, color: int) -> Markup:
    """A name beside the color that stands for it."""
    return Markup(f'<span class="key s{color}"><i></i>{html.escape(name)}</span>')


# --- machines -------------------------------------------------------------------------------------------

GIB = 2**30
MAX_RANKS = 64

Waits = dict[str, dict[int, float]]
"""Phase -> rank -> share of the phase's time that the rank waited in collectives."""


def nodes_section(samples: Sequence[dict[str, Any]]) -> str:
    """Tables of nodes and of ranks; "" without samples."""
    if not samples:
        return ""
    by_node: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_node.setdefault(sample["node"], []).append(sample)

    columns = ["node", "GPUs busy", "GPU memory, peak", "hottest", "power", "slowed down", "CPU"]
    columns += ["memory, peak", "disk free, least", "network in", "out", "InfiniBand in", "out"]
    rows = []
    for node in sorted(by_node):
        rows.append([str(node), *_of_node(by_node[node])])

    shown = f'<h2>Machines</h2><section class="phases">{wide_table(columns, rows)}'
    return shown + _ranks(waits_by_phase(samples)) + "</section>"


def _of_node(samples: Sequence[dict[str, Any]]) -> list[str]:
    gpus = []
    for of_one_sample in column(samples, "gpus"):
        gpus += of_one_sample
    rates = column(samples, "bytes_per_s")

    of_gpus = ["–"] * 5
    if gpus:
        slowed = sum(bool(g.get("slowdown", 0) & SLOWED) for g in gpus)
        busy = statistics.mean(column(gpus, "busy_fraction"))
        memory_gib = max(column(gpus, "memory_bytes")) / GIB
        power_w = statistics.mean(column(gpus, "power_w"))
        of_gpus = [
            f"{busy:.0%}",
            f"{memory_gib:.1f} GiB",
            f"{max(column(gpus, 'temperature_c'))} °C",
            f"{power_w:.0f} W",
            f"{slowed / len(gpus):.0%} of samples" if slowed else "never",
        ]
    return [
        *of_gpus,
        _over(samples, "cpu_fraction", statistics.mean, "{:.0%}"),
        _over(samples, "memory_fraction", max, "{:.0%}"),
        _over(samples, "disk_free_bytes", min, "{:.0f} GiB", GIB),
        _over(rates, "network_in", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "network_out", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "infiniband_in", statistics.mean, "{:,.0f} MB/s", 1e6),
        _over(rates, "infiniband_out", statistics.mean, "{:,.0f} MB/s", 1e6),
    ]


def _over(
    samples: Sequence[dict[str, Any]],
    name: str,
    of: Callable[[list[float]], float],
    form: str,
    unit: float = 1.0,
) -> str:
    values = column(samples, name)
    return form.format(of(values) / unit) if values else "–"


def waits_by_phase(samples: Sequence[dict[str, Any]]) -> Waits:
    """Share of each phase that each rank waited in collectives: a straggler waits least, since the others
    wait for it.

    The time between two samples of a node counts for the phase of the later one, where both name the same
    step's phase.
    """
    seconds: dict[str, dict[int, float]] = {}
    waited: dict[str, dict[int, float]] = {}
    last: dict[int, tuple[float, float, str]] = {}
    for sample in sorted(samples, key=lambda s: s["unix_s"]):
        phase = sample.get("phase", "")
        for name, (_, wait) in sample.get("ranks", {}).items():
            rank, at = int(name), sample["unix_s"]
            before = last.get(rank)
            last[rank] = (at, wait, phase)
            if before is None or before[2] != phase or wait < before[1]:  # the latter: started again
                continue
            for table, value in ((seconds, at - before[0]), (waited, wait - before[1])):
                table.setdefault(phase, {}).setdefault(rank, 0.0)
                table[phase][rank] += value
    shares: Waits = {}
    for phase, by_rank in sorted(seconds.items(), key=lambda p: -sum(p[1].values())):
        shares[phase] = {}
        for rank, total in sorted(by_rank.items()):
            if total > 0:
                shares[phase][rank] = waited[phase][rank] / total
    return shares


def stragglers(shares: dict[int, float]) -> list[int]:
    """Ranks that wait for much less of the time than the median of the others."""
    if len(shares) < 2:
        return []
    late = []
    for rank, share in shares.items():
        others = [value for other, value in shares.items() if other != rank]
        if statistics.median(others) - share >= STRAGGLES:
            late.append(rank)
    return late


def _ranks(shares: Waits) -> str:
    ranks = sorted(set().union(*shares.values()))
    if len(ranks) < 2:
        return ""
    rows = []
    for rank in ranks[:MAX_RANKS]:
        keeps = []
        for phase, of in shares.items():
            if rank in stragglers(of):
                keeps.append(phase or "all")

        cells = []
        for of in shares.values():
            cells.append(f"{of[rank]:.0%}" if rank in of else "–")

        rows.append([str(rank), *cells, f"keeps the others waiting: {', '.join(keeps)}" if keeps else ""])
    more = f"<p>{len(ranks) - MAX_RANKS} more ranks.</p>" if len(ranks) > MAX_RANKS else ""
    head = ("rank", *[phase or "all" for phase in shares], "")
    return f"<h3>Time waited in collectives, by phase and rank</h3>{wide_table(head, rows)}{more}"


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
        mine = [worker for worker in workers if worker["device"] == device]
        sampled = sum(column(mine, "completions"))
        alive = sum(worker["lives"] for worker in mine)
        share = f"{sampled / total:.0%}" if total else "–"
        rows.append([device, f"{alive} of {len(mine)}", f"{sampled:,}", share])
    shown = wide_table(["GPU", "alive at the end", "completions since the last start", "share"], rows)
    ended = [worker for worker in workers if not worker["lives"]]
    if ended:
        whys = [[worker["worker"], worker["why"]] for worker in ended[-MAX_ENDED:]]
        shown += wide_table(["worker", "why it ended"], whys)
    return f'<h2>Rollout workers</h2><section class="phases">{shown}</section>'


# --- samples --------------------------------------------------------------------------------------------

MAX_SAMPLES = 24
MAX_PICTURE_BYTES = 6_000_000
"""Bytes of all images in the page; those beyond it are named, not shown."""
IMAGE_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"RIFF", "webp"),
)
"""First bytes of the images that a run keeps."""


def _written_samples(run_dir: Path) -> list[dict[str, Any]]:
    """The samples of a run, without lines that no run wrote."""
    samples = []
    for line in read_lines(run_dir / SAMPLES):
        images = line.get("images", [])
        if type(line.get("step")) is int and isinstance(images, list):
            samples.append(line | {"verdict": str(line.get("verdict", "")), "images": images})
    return samples


def choose_samples(samples: Sequence[dict[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """At most `limit` samples, by whole steps: the first and the last ones, and evenly between; newest step
    first."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        steps.setdefault(sample["step"], []).append(sample)
    order = sorted(steps)
    while len(order) > 1:
        counts = [len(steps[step]) for step in order]
        if sum(min(count, limit) for count in counts) <= limit:
            break
        keep = max(len(order) * limit // sum(counts), 1)
        order = _evenly(order, min(keep, len(order) - 1))

    chosen = []
    for step in reversed(order):
        chosen += steps[step][:limit]
    return chosen


def _evenly(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, at even distances from the first to the last; the last if one is asked for."""
    if count == 1:
        return steps[-1:]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def samples_section(run_dir: Path) -> str:
    """Cards of some of the run's samples; "" without samples."""
    samples = _written_samples(run_dir)
    if not samples:
        return ""
    chosen = choose_samples(samples)
    left = f"{len(chosen)} written"
    if len(chosen) < len(samples):
        left = f"{len(chosen)} of {len(samples):,} written"
    buttons = ""
    for verdict in sorted({sample.get("verdict", "") for sample in chosen}):
        text = html.escape(verdict.replace("_", " "))
        buttons += f'<button data-verdict="{html.escape(verdict)}">{text}</button>'
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
        f"<h2>Samples <small>{left}</small></h2>"
        f'<div class="filter"><button data-verdict="" class="on">all</button>'
        f'{buttons}</div><section class="samples">{"".join(rows)}</section>'
    )


DECIDED_BY = {"exact": "exact arithmetic", "points": "values at points", "text": "its text"}
"""How a card says what decided (docs/rewards.md)."""


def _card(sample: dict[str, Any], pictures: Sequence[str]) -> str:
    verdict = str(sample.get("verdict", ""))
    in_question = len(pictures) - sum(sample.get("shown", []))
    beside = "".join(pictures[:in_question])
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
        f'<article data-verdict="{html.escape(verdict)}"><div class="pictures">{beside}</div>'
        f'<div class="said">'
        f'<p class="question">{html.escape(str(sample.get("question", "")))}</p>'
        f"{_said(sample, pictures[in_question:])}"
        f'<p class="grade"><span class="chip {html.escape(verdict)}">'
        f"{html.escape(verdict.replace('_', ' '))}</span>"
        f"<span>ground truth <b>{html.escape(str(sample.get('ground_truth', '')))}</b></span>"
        f"<small>{html.escape(' · '.join(numbers))}</small></p>"
        "</div></article>"
    )


def _said(sample: dict[str, Any], shown: Sequence[str]) -> str:
    """What the model said; of an episode, each reply and what was observed then, with the images that it
    showed."""
    dialog = sample.get("dialog")
    if not dialog:
        return f'<div class="answer">{_answer(str(sample.get("completion", "")))}</div>'
    left = list(shown)
    counts = iter(sample["shown"])
    turns = []
    for turn, text in enumerate(dialog):
        if turn % 2 == 0:
            turns.append(f'<div class="answer">{_answer(text)}</div>')
            continue
        count = next(counts, 0)
        images, left = left[:count], left[count:]
        turns.append(f'<div class="observed"><p>{html.escape(text)}</p>{"".join(images)}</div>')
    return "".join(turns)


def _answer(text: str, limit: int = 4000) -> str:
    """The completion with its think block dimmed and its answer block strong; the middle of a long one is
    left out."""
    if len(text) > limit:
        text = (
            text[: limit // 2] + f"\n[… {len(text) - limit:,} characters left out …]\n" + text[-limit // 2 :]
        )
    safe = html.escape(text)
    safe = re.sub(
        r"(&lt;think&gt;.*?(?:&lt;/think&gt;|$))", r'<span class="think">\1</span>', safe, flags=re.DOTALL
    )
    return re.sub(r"(&lt;answer&gt;.*?&lt;/answer&gt;)", r"<b>\1</b>", safe, flags=re.DOTALL)


def _pictures(folder: Path, names: Sequence[Any], budget: int) -> tuple[list[str], int]:
    """Each image in the page, or its name where it is no image of the run's own or the budget of bytes is
    spent; and what is left of it. folder: that of the run's sample images. The page is made to be handed on:
    no other file of this machine may come into it."""
    parts = []
    for name in names:
        file = inside(folder, str(name).removeprefix(f"{SAMPLE_IMAGES}/"))
        size = file.stat().st_size if file is not None and file.is_file() else 0
        data = file.read_bytes() if file is not None and 0 < size <= budget else b""
        kinds = [kind for first_bytes, kind in IMAGE_KINDS if data.startswith(first_bytes)]
        if not kinds:
            parts.append(f'<span class="absent">{html.escape(str(name))}</span>')
            continue
        budget -= size
        parts.append(f'<img alt="" src="data:image/{kinds[0]};base64,{base64.b64encode(data).decode()}">')
    return parts, budget
