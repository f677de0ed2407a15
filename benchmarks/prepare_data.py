"""Speed and memory of data preparation, against the way of the original guide plus the check that it lacks.

    python -m benchmarks.prepare_data [--pictures 6000] [--runs 5] [--out benchmarks/prepare_data.json]

The original way copies the archive to its place, unpacks it with tarfile and replaces the path prefix in the jsonl as
text; to learn whether every picture decodes, all files are then read and decoded with Pillow, in one process, or
(`original_parallel`) in as many as ours has. Ours unpacks, decodes, hashes, checks every row and answer, finds repeats
and near-identical pictures, splits, and writes Parquet shards, quarantine, statistics and preview. Variants alternate
on the same archive; every run is a process of its own. Memory is the largest sum of proportional shares (PSS) of the
process and its children, sampled, at the given size and at a quarter of it; CPU seconds are sampled likewise.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

FOREIGN = "/apdcephfs_gy2/share_302735770/berlinni/zgr/data/mathv60k/"
VARIANTS = ("original", "original_parallel", "ours")


def draw(seed: int) -> tuple[str, bytes]:
    """A photo-like JPEG (two of three) or a chart as PNG."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    width, height = int(rng.integers(250, 750)), int(rng.integers(200, 600))
    if seed % 3:
        base = Image.fromarray(rng.integers(0, 255, (height // 24 + 1, width // 24 + 1, 3), dtype=np.uint8))
        noise = rng.normal(0, 4, (height, width, 1))
        levels = np.asarray(base.resize((width, height), Image.Resampling.BICUBIC)) + noise
        image, kind = Image.fromarray(levels.clip(0, 255).astype(np.uint8)), "JPEG"
    else:
        image, kind = Image.new("RGB", (width, height), (255, 255, 255)), "PNG"
        pen = ImageDraw.Draw(image)
        for i in range(12):
            top = int(rng.integers(20, height - 20))
            shade = tuple(int(v) for v in rng.integers(0, 255, 3))
            pen.rectangle((i * width // 12, top, i * width // 12 + width // 16, height - 10), fill=shade)
            pen.text((int(rng.integers(width)), int(rng.integers(height))), f"label {seed}/{i}", fill=(0, 0, 0))
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return f"mathv60k_img/{'IconQA' if seed % 2 else 'PlotQA'}/{seed}.{kind.lower()}", buffer.getvalue()


def make(folder: Path, pictures: int) -> None:
    """The archive and one row per picture, with slashes escaped as pandas writes them."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    with (
        tarfile.open(folder / "mathv60k_img.tar.gz", "w:gz", compresslevel=1) as tar,
        open(folder / "mathv60k_message.jsonl", "w") as rows,
        ProcessPoolExecutor() as pool,
    ):
        for i, (name, data) in enumerate(pool.map(draw, range(pictures), chunksize=64)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            content = [
                {"type": "text", "text": f"Question {i}? " + "words " * 40},
                {"type": "image", "image": FOREIGN + name},
            ]
            system = {"role": "system", "content": "Solve the question. " * 20}
            message = json.dumps([system, {"role": "user", "content": content}]).replace("/", "\\/")
            answer = rng.choice([rng.choice("ABCD"), str(rng.randrange(1000)), f"{rng.random():.2f}"])
            rows.write(
                json.dumps({"question": content[0]["text"], "answer": f"$\\boxed{{{answer}}}$", "message": message})
            )
            rows.write("\n")


def decode(path: str) -> None:
    """Decodes one file fully."""
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
    paths = [str(path) for path in out.rglob("*.*") if path.suffix in (".jpeg", ".png")]
    if workers == 1:
        for path in paths:
            decode(path)
    else:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(decode, paths, chunksize=64))
    took["decode_s"] = time.perf_counter() - start - sum(took.values())
    return took


def ours(source: Path, out: Path, workers: int) -> dict[str, float]:
    """The whole preparation."""
    from data_prep import mathv60k
    from data_prep.prepare import prepare

    marks: dict[str, float] = {}
    start = time.perf_counter()
    files = mathv60k.local(source / "mathv60k_message.jsonl", source / "mathv60k_img.tar.gz")
    marks["hash of the sources"] = time.perf_counter()
    manifest = prepare(
        [files], out, "mathv60k", workers=workers,
        on_progress=lambda stage, done, total: marks.update({stage.split(" of ")[0]: time.perf_counter()}),
    )  # fmt: skip
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


def measure(variant: str, source: Path, scratch: Path) -> dict:
    """One run in its own process, its memory and its children's sampled."""
    import psutil

    out = scratch / "out"
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.prepare_data", "--child", variant, str(source), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak, parent = 0, psutil.Process(process.pid)
    cpu: dict[int, float] = {}
    while process.poll() is None:
        total = 0
        for one in [parent, *_children(parent)]:
            try:
                total += one.memory_full_info().pss
                cpu[one.pid] = sum(one.cpu_times()[:2])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        peak = max(peak, total)
        time.sleep(0.1)
    text = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{variant} failed with {process.returncode}")
    shutil.rmtree(scratch)
    return json.loads(text.splitlines()[-1]) | {"peak_mib": peak / 2**20, "cpu_s": sum(cpu.values())}


def _children(parent) -> list:
    import psutil

    try:
        return parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def main() -> None:
    """Makes the archive, alternates the variants, writes the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pictures", type=int, default=6000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--out", default="benchmarks/prepare_data.json")
    options.add_argument("--child", nargs=3, metavar=("VARIANT", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), Path(args.child[2]))
        return
    with tempfile.TemporaryDirectory(prefix="prepare-data-") as name:
        root = Path(name)
        make(root / "full", args.pictures)
        make(root / "quarter", args.pictures // 4)
        archive_bytes = (root / "full" / "mathv60k_img.tar.gz").stat().st_size
        print(f"{args.pictures} pictures, {archive_bytes / 1e6:.0f} MB", file=sys.stderr)
        runs: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
        for number in range(args.runs):
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                runs[variant].append(measure(variant, root / "full", root / "scratch"))
                print(f"{variant}: {runs[variant][-1]}", file=sys.stderr)
        quarter = measure("ours", root / "quarter", root / "scratch")
    ratios = {
        variant: [a["seconds"] / b["seconds"] for a, b in zip(runs[variant], runs["ours"], strict=True)]
        for variant in VARIANTS[:2]
    }
    middle = lambda values: round(statistics.median(values), 3)  # noqa: E731
    result = {
        "machine": f"{len(os.sched_getaffinity(0))} cores {platform.machine()}, python {platform.python_version()}",
        "pictures": args.pictures,
        "archive_mb": round(archive_bytes / 1e6, 1),
        "runs": args.runs,
        "seconds": {variant: middle([run["seconds"] for run in runs[variant]]) for variant in VARIANTS},
        "seconds_all": {variant: [round(run["seconds"], 2) for run in runs[variant]] for variant in VARIANTS},
        "cpu_seconds": {variant: middle([run["cpu_s"] for run in runs[variant]]) for variant in VARIANTS},
        "speedup_over_original": middle(ratios["original"]),
        "speedup_over_original_all": [round(ratio, 2) for ratio in ratios["original"]],
        "speedup_over_original_with_parallel_decode": middle(ratios["original_parallel"]),
        "peak_mib": {variant: middle([run["peak_mib"] for run in runs[variant]]) for variant in VARIANTS},
        "peak_mib_at_a_quarter_of_the_size": round(quarter["peak_mib"], 1),
        "phases_of_the_last_run": {variant: runs[variant][-1]["phases"] for variant in VARIANTS},
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if "phases" not in k}, indent=2))


if __name__ == "__main__":
    main()
