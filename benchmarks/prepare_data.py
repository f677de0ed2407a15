"""Speed and memory of data preparation, against the way of the original guide plus the check that it lacks.

    python -m benchmarks.prepare_data [--rows 8000] [--runs 3] [--out benchmarks/prepare_data.json]

The original way copies the archive to its place, unpacks it with tarfile and replaces the path prefix in the
jsonl as text; to learn whether every image decodes, all files are then read and decoded with Pillow, in one
process, or (`original_parallel`) in as many as ours has. Ours unpacks, decodes, hashes, checks every row and
answer, finds repeats and near-identical images, splits, and writes Parquet shards, quarantine, statistics and
preview. Variants alternate on the same archive; every run is a process of its own. Then every variant runs
once more and is watched (which takes a part of a core): memory is the largest sum of proportional shares
(PSS) of the process and its children, at the given size and at a quarter of it; CPU seconds are sampled
likewise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.machine import processor
from benchmarks.prepare_data_source import FOREIGN, make

VARIANTS = ("original", "original_parallel", "ours")


def decode(path: str) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.load()


def original(source: Path, out: Path, workers: int) -> dict[str, float]:
    """Copy, extractall, text replace; then the missing check."""
    took = {}
    start = time.perf_counter()
    archive = Path(shutil.copy(source / "mathv60k_img.tar.gz", out))
    took["copy_s"] = time.perf_counter() - start
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="fully_trusted")
    with open(source / "mathv60k_message.jsonl") as rows, open(out / "mathv60k_message.jsonl", "w") as fixed:
        for row in rows:
            fixed.write(row.replace(FOREIGN, f"{out}/"))
    took["extract_s"] = time.perf_counter() - start - took["copy_s"]
    paths = [str(path) for path in out.rglob("*.*") if path.suffix in (".jpg", ".png")]
    if workers == 1:
        for path in paths:
            decode(path)
    else:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(decode, paths, chunksize=64))
    took["decode_s"] = time.perf_counter() - start - sum(took.values())
    return took


def ours(source: Path, out: Path, workers: int) -> dict[str, float]:
    from data_prep.prepare import prepare
    from data_prep.sources import mathv60k

    marks: dict[str, float] = {}
    start = time.perf_counter()
    files = mathv60k.local(source / "mathv60k_message.jsonl", source / "mathv60k_img.tar.gz")
    marks["hash of the sources"] = time.perf_counter()
    manifest = prepare(
        [files],
        out,
        "mathv60k",
        workers=workers,
        on_progress=lambda stage, done, total: marks.update({stage.split(" of ")[0]: time.perf_counter()}),
    )
    marks["manifest"] = time.perf_counter()
    accounted = sum(manifest.rows.values()) + sum(manifest.quarantined.values())
    assert accounted == (source / "mathv60k_message.jsonl").read_bytes().count(b"\n"), "rows were lost"
    took = {}
    for stage, end in marks.items():
        took[f"until {stage}_s"] = end - start
    return took


def child(variant: str, source: Path, out: Path) -> None:
    """Runs one variant and prints its time as JSON."""
    workers = len(os.sched_getaffinity(0))
    start = time.perf_counter()
    phases = (
        ours(source, out, workers)
        if variant == "ours"
        else original(source, out, 1 if variant == "original" else workers)
    )
    print(json.dumps({"seconds": time.perf_counter() - start, "phases": phases}))


def measure(variant: str, source: Path, scratch: Path, sampled: bool = False) -> dict:
    """One run in its own process; `sampled`: its memory and processor time, and its children's, which slows
    it down."""
    out = scratch / "out"
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.prepare_data", "--child", variant, str(source), str(out)]
    text, peak_mib, cpu_s = watch(command, sampled)
    shutil.rmtree(scratch)
    return json.loads(text.splitlines()[-1]) | {"peak_mib": peak_mib, "cpu_s": cpu_s}


def watch(command: list[str], sampled: bool = True) -> tuple[str, float, float]:
    """Runs a command. Returns its output, the largest sum of proportional shares (MiB) and CPU seconds, 0
    unsampled."""
    import psutil

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak, parent = 0, psutil.Process(process.pid)
    cpu: dict[int, float] = {}
    while sampled and process.poll() is None:
        total = 0
        for one in [parent, *_children(parent)]:
            try:
                total += one.memory_full_info().pss
                cpu[one.pid] = sum(one.cpu_times()[:2])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        peak = max(peak, total)
        time.sleep(0.1)
    text = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return text, peak / 2**20, sum(cpu.values())


def _children(parent) -> list:
    import psutil

    try:
        return parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def by_variant(runs: dict[str, list[dict]], watched: dict[str, dict]) -> dict[str, dict]:
    """Seconds, processor seconds and largest memory of each variant."""
    figures: dict[str, dict] = {"seconds": {}, "seconds_all": {}, "cpu_seconds": {}, "peak_mib": {}}
    for variant in VARIANTS:
        seconds = [run["seconds"] for run in runs[variant]]
        figures["seconds"][variant] = middle(seconds)
        figures["seconds_all"][variant] = [round(value, 2) for value in seconds]
        figures["cpu_seconds"][variant] = round(watched[variant]["cpu_s"], 2)
        figures["peak_mib"][variant] = round(watched[variant]["peak_mib"], 1)
    return figures


def main() -> None:
    """Makes the archive, alternates the variants, writes the figures."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, default=8000)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument(
        "--source", default="", metavar="DIR", help="make the archives there and keep them, or use them"
    )
    options.add_argument("--out", default="benchmarks/prepare_data.json")
    options.add_argument("--child", nargs=3, metavar=("VARIANT", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), Path(args.child[2]))
        return
    with tempfile.TemporaryDirectory(prefix="prepare-data-") as name:
        root = Path(name)
        kept = Path(args.source) if args.source else root
        source, quarter_of = make(kept / "full", args.rows), make(kept / "quarter", args.rows // 4)
        print(source, file=sys.stderr)
        runs: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
        for number in range(args.runs):
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                runs[variant].append(measure(variant, kept / "full", root / "scratch"))
                print(f"{variant}: {runs[variant][-1]}", file=sys.stderr)
        watched = {
            variant: measure(variant, kept / "full", root / "scratch", sampled=True) for variant in VARIANTS
        }
        quarter = measure("ours", kept / "quarter", root / "scratch", sampled=True)
    ratios = {
        variant: [a["seconds"] / b["seconds"] for a, b in zip(runs[variant], runs["ours"], strict=True)]
        for variant in VARIANTS[:2]
    }

    ratios_shown = [round(ratio, 2) for ratio in ratios["original"]]
    phases = {variant: runs[variant][-1]["phases"] for variant in VARIANTS}
    sizes = (
        (quarter_of["rows"], quarter["peak_mib"]),
        (source["rows"], watched["ours"]["peak_mib"]),
    )
    result = {
        "machine": f"{len(os.sched_getaffinity(0))} cores {processor()}, python {platform.python_version()}",
        "source": source,
        "runs": args.runs,
        **by_variant(runs, watched),
        "speedup_over_original": middle(ratios["original"]),
        "speedup_over_original_all": ratios_shown,
        "speedup_over_original_with_parallel_decode": middle(ratios["original_parallel"]),
        "memory_of_ours": {f"{size} rows": {"peak_mib": round(mib, 1)} for size, mib in sizes},
        "phases_of_the_last_run": phases,
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if "phases" not in k}, indent=2))


if __name__ == "__main__":
    main()
