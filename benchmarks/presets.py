"""Does the demo learn with every published set of options, and with samples of older weights?

    python -m benchmarks.presets --seeds 0,1,2 --out benchmarks/presets.json
    python -m benchmarks.presets --option rollout.staleness --values 0,1,2,4 --out benchmarks/staleness.json

For every seed one warm start, then GRPO with the demo's settings and each set of
`trainer.config.Algorithm.PRESETS`, or each value of another option: held-out accuracy by step, mean over
sampled completions at temperature 1. Runs that are in the output file already are not repeated. Draws
docs/presets.svg of the sets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.learning import ROOT, call, demo_config, train
from trainer import config as c

PLOT = ROOT / "docs" / "presets.svg"
WIDE = 180
HIGH = 120
PAD = 30
COLUMNS = 5
COLORS = ("#3b6fb6", "#c8553d", "#588157")


def settings(option: str, value: str, seed: int, data: Path, model: Path) -> c.RunConfig:
    """The demo's run with one option, or one set of them, changed."""
    config = demo_config(seed, data, model)
    config = replace(config, checkpoint=replace(config.checkpoint, export_hf="never"))
    return c.override(config, [f"{option}={value}"])


def off_policy(lines: list[dict]) -> dict[str, float]:
    """The largest figures of a run of what older weights do to the ratios; empty where none sampled."""
    steps = [line for line in lines if "staleness/kl" in line]
    if not steps:
        return {}
    divergences = [line["staleness/kl"] for line in steps]
    effective = [line["staleness/ess"] for line in steps]
    corrected = [line["staleness/corrected_fraction"] for line in steps]
    kernels = [line["mismatch/kl"] for line in steps if "mismatch/kl" in line]
    return {
        "staleness_kl_max": round(max(divergences), 5),
        "staleness_ess_min": round(min(effective), 4),
        "corrected_fraction_max": round(max(corrected), 5),
        "mismatch_kl_max": max(kernels),
    }


def panel(name: str, curves: list[dict[str, float]], last: int) -> str:
    """One set's curves, a line per seed, from 0 to 1 over the steps."""

    def at(step: str, value: float) -> str:
        return f"{PAD + int(step) / last * WIDE:.1f},{PAD + (1 - value) * HIGH:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{COLORS[i % len(COLORS)]}"'
        f' points="{" ".join(at(*p) for p in curve.items())}"/>'
        for i, curve in enumerate(curves)
    )
    rules = "".join(
        f'<path d="M{PAD} {PAD + (1 - y) * HIGH:.0f}h{WIDE}" stroke="#ddd"/>'
        f'<text x="{PAD - 4}" y="{PAD + (1 - y) * HIGH + 4:.0f}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.5, 1)
    )
    ends = f'<text x="{PAD + WIDE}" y="{PAD + HIGH + 14}" text-anchor="end">step {last}</text>'
    return f'{rules}{lines}{ends}<text x="{PAD}" y="{PAD - 8}" font-weight="bold">{name}</text>'


def plot(runs: list[dict]) -> str:
    """All sets side by side as SVG."""
    names = [name for name in c.Algorithm.PRESETS if any(r["preset"] == name for r in runs)]
    last = max(int(step) for r in runs for step in r["accuracy"])
    wide, high = WIDE + PAD + 20, HIGH + 2 * PAD
    panels = [
        f'<g transform="translate({i % COLUMNS * wide},{i // COLUMNS * high})">'
        f"{panel(name, [r['accuracy'] for r in runs if r['preset'] == name], last)}</g>"
        for i, name in enumerate(names)
    ]
    size = f"{min(len(names), COLUMNS) * wide} {-(-len(names) // COLUMNS) * high}"
    style = "font-family:sans-serif;font-size:11px;fill:#333"
    body = "\n".join(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><g'
        f' style="{style}">\n{body}\n</g></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--option", default="algorithm", help="what is varied")
    parser.add_argument("--values", default=",".join(c.Algorithm.PRESETS))
    parser.add_argument("--scratch", help="keeps data, warm starts and runs here, for the next call")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "presets.json"))
    options = parser.parse_args()
    out = Path(options.out)
    runs: list[dict] = json.loads(out.read_text())["runs"] if out.exists() else []
    label = "preset" if options.option == "algorithm" else options.option
    done = {(r[label], r["seed"]) for r in runs}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(options.scratch or temporary)
        data = scratch / "shapes"
        if not data.exists():
            call("examples.demo.shapes", "--out", str(data))
        for seed in map(int, options.seeds.split(",")):
            folder = scratch / str(seed)
            folder.mkdir(parents=True, exist_ok=True)
            model = folder / "model"
            if not model.exists():
                call(
                    "examples.demo.warm_start", "--data", str(data), "--out", str(model), "--seed", str(seed)
                )
            for name in options.values.split(","):
                if (name, seed) in done:
                    continue
                config = settings(options.option, name, seed, data, model)
                lines = train(config, folder, f"{options.option}-{name}")[1]
                curve = {str(m["step"]): round(m["eval/accuracy"], 4) for m in lines if "eval/accuracy" in m}
                gain = round(100 * (list(curve.values())[-1] - curve["0"]), 1)
                runs.append({label: name, "seed": seed, "gain_points": gain, "accuracy": curve})
                runs[-1] |= off_policy(lines)
                print(json.dumps(runs[-1]), flush=True)
                worst: dict[str, float] = {}
                for run in runs:
                    worst[run[label]] = min(run["gain_points"], worst.get(run[label], math.inf))
                result = {
                    "machine": f"{os.cpu_count()} CPU cores",
                    "metric": "held-out accuracy, 128 rows x 4 completions at temperature 1",
                    "worst_gain_points": worst,
                    "runs": runs,
                }
                out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
                if label == "preset":
                    PLOT.write_text(plot(runs))


if __name__ == "__main__":
    main()
