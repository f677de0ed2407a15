"""The card of a trained model: what it was made from and how, its curves, scores, hours and dollars.

Written by `launch.py publish` (trainer/observe/publish.py) through huggingface_hub's own card.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from trainer import config as configuration
from trainer.config import RunConfig
from trainer.config.model_name import is_hub_name, model_name
from trainer.observe.charts import Chart, line_chart
from trainer.observe.history import column
from trainer.observe.live import format_duration
from trainer.observe.report_charts import CHARTS, HELD_OUT, chart_with_band, with_edges
from trainer.observe.report_page import format_cost

CURVES = "curves.svg"
SHOWN = ("Accuracy", "Reward", "KL to the reference", "Completion length", "Cross-entropy")
"""Titles of the charts that the picture has."""
GAP = 16
TITLE = 20
"""Height of a title."""
STYLE = (
    "text{font:12px sans-serif;fill:#555}.title{font-weight:bold;fill:#222}.ytick{text-anchor:end}"
    ".xtick{text-anchor:middle}.grid{stroke:#ddd}.main{fill:none;stroke-width:2}.raw{fill:none;opacity:.3}"
    ".mark{stroke:#999;stroke-dasharray:2 3}.band{fill:#2563c9;opacity:.12}"
    ".s1{stroke:#2563c9}.s2{stroke:#c2410c}.s3{stroke:#15803d}.s4{stroke:#b91c1c}.s5{stroke:#7c3aed}"
    ".s6{stroke:#0e7490}.s7{stroke:#a16207}.s8{stroke:#64748b}.dots circle{fill:#fff}"
    ".t1{fill:#2563c9}.t2{fill:#c2410c}.t3{fill:#15803d}.t4{fill:#b91c1c}.t5{fill:#7c3aed}.t8{fill:#64748b}"
)


@dataclass(frozen=True)
class Picture:
    """One chart's drawing."""

    title: str
    """The chart's title and what its lines are, as SVG text."""
    width: float
    height: float
    shapes: str


def draw_curves(history: Sequence[dict[str, Any]], config: RunConfig) -> str:
    """The curves of a run as one SVG picture, narrow ones two in a row; empty where none of its metrics is
    drawn."""
    drawn = with_edges(history, config.expected)
    pictures = []
    for chart in (HELD_OUT, *CHARTS):
        if chart.title in SHOWN:
            picture = _picture(chart_with_band(chart, config.expected), drawn)
            if picture is not None:
                pictures.append(picture)
    if not pictures:
        return ""
    width = max(picture.width for picture in pictures)
    placed = []
    left = top = bottom = 0.0
    for picture in pictures:
        if left + picture.width > width:
            left, top = 0.0, bottom
        placed.append(
            f'<text class="title" x="{left + 8:g}" y="{top + 14:g}">{picture.title}</text>'
            f'<svg x="{left:g}" y="{top + TITLE:g}" width="{picture.width:g}" height="{picture.height:g}">'
            f"{picture.shapes}</svg>"
        )
        bottom = max(bottom, top + TITLE + picture.height + GAP)
        left += picture.width + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom:g}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(placed)}</svg>\n'
    )


def _picture(chart: Chart, history: Sequence[dict[str, Any]]) -> Picture | None:
    """None where the chart has no value."""
    figure = line_chart(chart, history)
    match = re.search(r'<svg class="\w*" viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', figure, re.DOTALL)
    if match is None:
        return None
    title = html.escape(chart.title)
    for line in chart.lines:
        if line.label:
            title += f' <tspan class="t{line.color}">{html.escape(line.label)}</tspan>'
    return Picture(title, float(match[1]), float(match[2]), match[3])


def model_card(
    name: str,
    config: RunConfig,
    history: Sequence[dict[str, Any]],
    manifest: Mapping[str, Any],
    scores: Mapping[str, Any],
    folder: Path,
    drawn: bool,
) -> ModelCard:
    """The card of a run. scores: the content of its evaluation's benchmarks.json, or {}. drawn: whether the
    curves stand beside it."""
    data = ModelCardData(
        base_model=config.model.path if is_hub_name(config.model.path) else None,
        library_name="peft" if config.lora.rank else "transformers",
        tags=["spotrl", config.method],
    )
    launch = manifest.get("launch", {})
    parts = [
        f"# {name}",
        _opening(config, launch),
        _figures(history, folder),
        f"![Curves of the run]({CURVES})" if drawn else "",
        _benchmarks(scores),
        _origin(launch, manifest.get("run", {})),
        _options(config),
        _again(launch),
    ]
    body = "\n\n".join(filter(None, parts))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _opening(config: RunConfig, launch: Mapping[str, Any]) -> str:
    what = "An adapter for" if config.lora.rank else "Weights of"
    method = {"grpo": "GRPO", "sft": "supervised fine-tuning"}[config.method]
    if config.teaches:
        method = f"on-policy distillation from {model_name(config.algorithm.teacher)}"
    recipe = f" by the recipe `{launch['recipe']}`" if "recipe" in launch else ""
    return f"{what} {model_name(config.model.path)}, trained with {method}{recipe} of SpotRL."


def _figures(history: Sequence[dict[str, Any]], folder: Path) -> str:
    """A table of what the run reached and took."""
    rows = []
    for label, metric in (
        ("held-out accuracy", "eval/accuracy"),
        ("reward", "reward/mean"),
        ("KL to the reference", "kl/mean"),
        ("KL to the teacher", "teacher/kl"),
        ("loss", "sft/loss"),
    ):
        values = column(history, metric)
        if values:
            rows.append(f"| {label} | {values[0]:.4g} | {values[-1]:.4g} |")
    stamps = column(history, "time/unix_s")
    took = format_duration(stamps[-1] - stamps[0]) if stamps else "not known"
    table = "\n".join(["| | first | last |", "|---|---|---|", *rows])
    return f"{table}\n\n{history[-1]['step']} steps in {took}; dollars: {format_cost(folder)}."


def _benchmarks(scores: Mapping[str, Any]) -> str:
    if not scores:
        return "No benchmark was scored."
    rows = []
    for name, one in scores["benchmarks"].items():
        low, high = one["interval"]
        published = f"{one['published']['accuracy']:.1%}" if "published" in one else "–"
        interval = f"{low:.1%} to {high:.1%}"
        rows.append(f"| {name} | {one['accuracy']:.1%} | {interval} | {one['problems']:,} | {published} |")
    head = "| benchmark | accuracy | 95% interval | problems | published for the base model |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _origin(launch: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Commit, diff, data and machines."""
    lines = ["## What it was made from", ""]
    if "commit" in launch:
        patch = launch.get("diff")
        changed = " with the changes in `run/manifest.json`" if patch else ""
        changed = " with changes that are not published" if patch is None else changed
        lines.append(f"- Code: commit `{launch['commit']}`{changed}")
    data = run.get("data") or {}
    if data.get("fingerprint"):
        lines.append(f"- Data: {data.get('name', '')}, fingerprint `{data['fingerprint']}`")
    for name, digest in (data.get("files") or {}).items():
        lines.append(f"  - `{name}`: sha256 `{digest[:16]}...`")
    for name, digest in (launch.get("locks") or {}).items():
        lines.append(f"- `requirements/{name}`: sha256 `{digest[:16]}...`")
    hardware = run.get("hardware")
    if hardware:
        lines.append(f"- Machines: {json.dumps(hardware)}")
    return "\n".join(lines)


def _options(config: RunConfig) -> str:
    """Every option that is not the default."""
    default = configuration.to_dict(RunConfig())
    changed: dict[str, Any] = {}
    for section, values in configuration.to_dict(config).items():
        if not isinstance(values, dict):
            changed[section] = values
            continue
        own = {}
        for key, value in values.items():
            if value != default[section][key]:
                own[key] = PurePath(value).name if str(value).startswith("/") else value
        if own and section not in ("expected", "placement", "checkpoint"):
            changed[section] = own
    shown = yaml.safe_dump(changed, sort_keys=False)
    return (
        f"## Options\n\nWhat is not the default; all of them are in `run/config.yaml`.\n\n```yaml\n{shown}```"
    )


def _again(launch: Mapping[str, Any]) -> str:
    if not launch.get("commit"):
        return ""
    if launch.get("diff") is None:
        return (
            "## The same run again\n\nThe code had changes that are not published: who launched the run can"
            " repeat it exactly, and others can train with the options above."
        )
    return (
        "## The same run again\n\n```bash\npython3 launch.py reproduce run/manifest.json\n```\n\n"
        "On CPUs of one kind the result is equal to the bit; on GPUs the prompts, seeds and order are."
    )
