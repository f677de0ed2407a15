"""What the ZeRO stages and packing cost as the link between nodes slows, beside what the plan's model says.

    python -m benchmarks.links    # as root; 30 minutes; adds to links.json and docs/links.svg

Hosts are namespaces of this machine with links of a stated rate (tests/lab); one rank each, started by
torchrun, trains a model of 28 layers on rows of about 150 tokens. Rows per step grow with the hosts. Bytes
are read from each host's network card. From the runs without a limit and the bytes that the plan's model
counts, the others are predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from data_prep.write.shards import write_dataset
from examples.demo import tiny_model
from recipes.plan.step_seconds import update_seconds
from tests.lab import hosts
from tests.soak import rows as soak_rows
from trainer import config as c
from trainer.data.schema import Row
from trainer.hardware.model_shapes import from_config

ROOT = Path(__file__).resolve().parents[1]
OUT, PLOT = ROOT / "benchmarks/links.json", ROOT / "docs/links.svg"
ROWS = 8
BUDGET = 512
STEPS = 4
WARM_UP = 1
PORT = 29_500
"""Rows per rank and step, tokens of a pass; the first steps are not counted."""
SHAPE = tiny_model.TinyShape(320, 640, 28, 10, 2, 128, 256, 2, True)
"""Its matrices have more than 100,000 elements: DeepSpeed keeps smaller ones whole on every rank at stage 3
too."""
RATES = (0, 1000, 200)
"""Mbit/s of each host's link; 0: as fast as this machine is."""
HEADER = 1.03
"""Bytes on the wire per byte sent: Ethernet, IP and TCP headers of packets of 1,500 bytes, and
acknowledgements."""


@dataclass(frozen=True)
class Case:
    """One run."""

    hosts: int
    megabit: int
    stage: int
    packed: bool = True
    """Or a pass for every row, as without a token budget."""


CASES = (
    *(Case(2, rate, stage) for rate in RATES for stage in (1, 3)),
    Case(2, 1000, 3, packed=False),
    Case(2, 200, 2),
    Case(1, 0, 1),
    *(Case(4, 1000, stage) for stage in (1, 3)),
    Case(2, 0, 2),
    Case(2, 1000, 2),
)


@dataclass(frozen=True)
class Measured:
    """Medians of a run's steps after the first ones."""

    step_s: float
    passes: float
    sent_mib: float
    """By one host's card per step."""
    loss: float


def solved(count: int) -> Iterator[Row]:
    """Text rows of unequal lengths."""
    rng = random.Random(0)
    for _ in range(count):
        yield replace(soak_rows.row(rng, []), solution=soak_rows.TEXT * rng.randint(1, 6))


def settings(case: Case, folder: Path, run: Path) -> c.RunConfig:
    """The trainer's configuration of a case."""
    return c.RunConfig(
        method="sft",
        run=c.Run(name="links", dir=str(run), max_steps=STEPS),
        model=c.Model(path=str(folder / "model"), dtype="fp32", gradient_checkpointing=False),
        data=c.Data(path=str(folder / "data")),
        # No weight stays gathered between two uses, as none of a model above DeepSpeed's limits does.
        optimizer=c.Optimizer(learning_rate=1e-4, zero_stage=case.stage, live_parameters=0),  # ty: ignore
        algorithm=c.Algorithm(micro_batch_tokens=BUDGET if case.packed else 1),
        sft=c.SFT(batch_size=ROWS * case.hosts, epochs=100, max_tokens=1024),
        checkpoint=c.Checkpoint(every_steps=10**6, export_hf="never", shared_files=True),
        placement=c.Placement(nodes=case.hosts, workers_per_node=1, device="cpu"),
        rewards=c.Rewards(workers=1),
        logging=c.Logging(tensorboard=False),
    )


def measure(case: Case, folder: Path) -> Measured:
    """Runs a case to its end. Raises RuntimeError with a rank's last words."""
    names = [f"h{i}" for i in range(case.hosts)]
    with tempfile.TemporaryDirectory() as scratch, hosts.Lab(names, Path(scratch)) as lab:
        run, path = Path(scratch) / "run", Path(scratch) / "run.yaml"
        path.write_text(c.dump(settings(case, folder, run)))
        if case.megabit:
            lab.shape(case.megabit)
        master = lab.hosts[names[0]].address
        logs = [Path(scratch) / f"{name}.log" for name in names]
        env = {
            "NNODES": case.hosts,
            "MASTER_ADDR": master,
            "MASTER_PORT": PORT,
            "GPUS_PER_NODE": 1,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "eth1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = ["bash", "examples/torchrun/sft.sh", str(path)]
        started = [
            lab.hosts[name].start(command, log, {k: str(v) for k, v in (env | {"NODE_RANK": rank}).items()})
            for rank, (name, log) in enumerate(zip(names, logs, strict=True))
        ]
        sent = watch(started, run / "metrics.jsonl", lab.hosts[names[0]], logs)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["step"] > WARM_UP]

        def median(key: str) -> float:
            return statistics.median(line[key] for line in lines)

        per_step = (sent[STEPS] - sent[WARM_UP]) / (STEPS - WARM_UP) / 2**20
        return Measured(median("time/step_s"), median("perf/passes"), per_step, lines[-1]["sft/loss"])


def watch(
    started: list[subprocess.Popen[bytes]], metrics: Path, host: hosts.Host, logs: list[Path]
) -> dict[int, int]:
    """Bytes that a host's card had sent when each step's line was written."""
    sent: dict[int, int] = {}
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if done and done not in sent:
            card = next(line for line in host.run("cat", "/proc/net/dev").splitlines() if "eth1:" in line)
            sent[done] = int(card.split(":")[1].split()[8])
        time.sleep(0.02)
    if any(process.wait() for process in started):
        raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
    return sent


def predicted(found: dict[Case, Measured], folder: Path) -> dict[Case, float]:
    """Seconds per step where the link is limited: those of the same hosts and stage without a limit, and what
    `recipes.plan.cost` says is sent, at the link's rate. Here nothing is sent beside the arithmetic, and
    gloo's reduce-scatter is an all-reduce, which sends twice as much."""
    shape = from_config(json.loads((folder / "model/config.json").read_text()))
    out = {}
    for case, measured in found.items():
        free = found.get(replace(case, megabit=0))
        if not case.megabit or free is None:
            continue
        passes = round(measured.passes)
        gather = shape.parameters * 4 * HEADER * (case.hosts - 1) / case.hosts / (case.megabit * 1e6 / 8)
        own = update_seconds(settings(case, folder, folder), shape, [0.0] * passes, 0.0, gather, gather, 0.0)
        out[case] = free.step_s + own + (passes * gather if case.stage == 3 else 0.0)
    return out


def plot(found: dict[Case, Measured], expected: dict[Case, float]) -> str:
    """Seconds per step of two hosts over the link's rate: points are measured, dashes are the plan's
    model."""
    wide = 420
    high = 240
    pad = 46
    top = 1.1 * max(m.step_s for case, m in found.items() if case.hosts == 2 and case.packed)

    def x(i: int) -> float:
        return pad + 30 + i * (wide - 60) / (len(RATES) - 1)

    def y(s: float) -> float:
        return pad / 2 + high * (1 - s / top)

    parts = []
    colors = {1: "#588157", 2: "#3b6fb6", 3: "#c8553d"}
    for stage, color in ((stage, colors[stage]) for stage in colors if Case(2, 0, stage) in found):
        rates = [rate for rate in RATES if Case(2, rate, stage) in found]
        at = [(x(RATES.index(rate)), y(found[Case(2, rate, stage)].step_s)) for rate in rates]
        start = Case(2, 0, stage)
        seconds = {start: found[start].step_s} | expected
        plan = [(x(RATES.index(rate)), y(seconds[Case(2, rate, stage)])) for rate in rates]

        def line(points: list[tuple[float, float]]) -> str:
            return " ".join(f"{a:.0f},{b:.0f}" for a, b in points)

        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{line(at)}"/>')
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-dasharray="4 3" points="{line(plan)}"/>')
        parts += [f'<circle cx="{a:.0f}" cy="{b:.0f}" r="3" fill="{color}"/>' for a, b in at]
        parts.append(
            f'<text x="{at[-1][0] + 8:.0f}" y="{at[-1][1] + 4:.0f}" fill="{color}">ZeRO-{stage}</text>'
        )
    for i, rate in enumerate(RATES):
        text = f"{rate} Mbit/s" if rate else "no limit"
        parts.append(f'<text x="{x(i):.0f}" y="{high + pad / 2 + 18:.0f}" text-anchor="middle">{text}</text>')
    parts.append(f'<path d="M{pad} {pad / 2}V{high + pad / 2}H{wide + pad}" fill="none" stroke="#999"/>')
    for mark in range(0, int(top) + 1, max(1, int(top) // 4)):
        parts.append(f'<text x="{pad - 6}" y="{y(mark) + 4:.0f}" text-anchor="end">{mark} s</text>')
    body = "\n".join(parts)
    style = "font-family:sans-serif;font-size:11px;fill:#333"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 2 * pad + 20} {high + 2 * pad}">'
        f'<g style="{style}">\n{body}\n</g></svg>\n'
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if why := hosts.missing():
        raise SystemExit(why)
    known = json.loads(OUT.read_text())["runs"] if OUT.exists() else []
    found = {Case(**pick(run, Case)): Measured(**pick(run, Measured)) for run in known}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        tiny_model.SHAPES["links"] = SHAPE
        tiny_model.build(folder / "model", 0, "links", "qwen2")  # ty: ignore[invalid-argument-type]
        write_dataset(folder / "data", "links", {"train": solved(256)}, {})
        for case in (case for case in CASES if case not in found):
            found[case] = measure(case, folder)
            print(case, found[case], flush=True)
            write(found, predicted(found, folder))
        write(found, predicted(found, folder))


def write(found: dict[Case, Measured], expected: dict[Case, float]) -> None:
    """The file and the plot."""
    runs = [asdict(one) | asdict(m) | {"planned_s": expected.get(one)} for one, m in found.items()]
    machine = {"cpus": os.cpu_count(), "processor": processor()}
    OUT.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))
    PLOT.write_text(plot(found, expected))


def pick(run: dict[str, Any], kind: Any) -> dict[str, Any]:
    """What of a line of the file belongs to one of its parts."""
    return {field.name: run[field.name] for field in fields(kind)}


if __name__ == "__main__":
    main()
